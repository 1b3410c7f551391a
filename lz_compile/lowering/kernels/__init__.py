"""Kernels: one module beside its capabilities descriptor, found by file name (see ``runtime/kernels/registry.py``)."""
