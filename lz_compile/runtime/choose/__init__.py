"""The decision, in a compile and in eager code."""
