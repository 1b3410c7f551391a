"""What ops mean, which kernels run them, and the hand-off to Inductor."""
