"""Kernels in Triton. Importing one of these modules imports Triton, so adapters do that when they are first called."""
