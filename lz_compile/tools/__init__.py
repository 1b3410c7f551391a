"""Tuning, solving, explaining, diagnosis, and their command line."""
