"""Recurrences that became a scan, as kernels."""
