"""The stages of a compile, its options, and what holds them together."""
