"""Graph in, recognised ops out."""
