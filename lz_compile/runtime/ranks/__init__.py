"""Ranks of one job: what they agree on through the job's key-value store."""
