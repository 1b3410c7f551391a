"""Loops over time that are written in Python, as scans: Dynamo sees one step of them instead of all."""
