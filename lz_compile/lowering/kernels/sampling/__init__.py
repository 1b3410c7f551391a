"""Filters and draws."""
