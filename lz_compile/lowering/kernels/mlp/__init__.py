"""Activations of MLPs."""
