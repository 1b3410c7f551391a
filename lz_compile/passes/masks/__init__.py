"""What the mask of an attention means."""
