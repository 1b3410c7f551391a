"""Calls that hide an op, as the operations that they consist of."""
