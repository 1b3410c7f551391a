"""Matches, and the nodes that are emitted in their place."""
