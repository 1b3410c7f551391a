"""Loops that Dynamo unrolled, and recurrences, read as scans."""
