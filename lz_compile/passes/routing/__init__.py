"""What the recogniser of routed adapters needs alone."""
