"""One problem: operation, device, dtype, sizes, features."""
