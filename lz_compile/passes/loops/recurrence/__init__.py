"""Reads a step as a recurrence."""
