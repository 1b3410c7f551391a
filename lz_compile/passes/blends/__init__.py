"""Blends of a host with a seed, by their coefficients."""
