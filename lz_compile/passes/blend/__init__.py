"""Blends of a seed and a host."""
