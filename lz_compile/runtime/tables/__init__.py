"""Decisions kept in files."""
