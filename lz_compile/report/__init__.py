"""What happened, as objects, as text and as files."""
