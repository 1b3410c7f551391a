"""Measurements, one script per claim; run from the repository root: ``python -m benchmarks.attention``."""
