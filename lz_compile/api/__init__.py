"""Public calls, an op or a family each."""
