"""Which kernels there are, what they can do, and which have failed."""
