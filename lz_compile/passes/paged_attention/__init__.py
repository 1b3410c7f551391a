"""Attention over caches in blocks."""
