"""Whole tasks with the reference models, each run as a module from the root of the repository."""
