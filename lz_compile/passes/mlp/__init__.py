"""Gated and plain MLPs."""
