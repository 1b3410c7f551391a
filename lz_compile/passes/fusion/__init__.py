"""Several matches that one kernel computes."""
