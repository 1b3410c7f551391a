"""Latencies: measured, kept, estimated."""
