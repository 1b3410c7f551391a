"""Reference models in plain PyTorch, one architecture per file: what tests and benchmarks compile."""
