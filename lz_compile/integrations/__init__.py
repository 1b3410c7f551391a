"""Other libraries: each module registers us with one, when it is imported."""
