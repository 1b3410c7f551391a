"""Finds repeated calls, and puts a loop in their place."""
