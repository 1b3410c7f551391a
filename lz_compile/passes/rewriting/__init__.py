"""Matches, emitted nodes, and edits that happen whole or not at all."""
