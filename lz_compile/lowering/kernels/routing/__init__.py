"""Routed adapters."""
