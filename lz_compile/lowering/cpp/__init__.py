"""C++ for CPUs, written for one structure of a problem and built as Inductor builds its own."""
