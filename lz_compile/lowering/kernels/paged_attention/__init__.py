"""Kernels of attention over a cache in blocks."""
