"""Filters of scores before a draw: what they keep, found by what they do."""
