"""Structural changes of a graph: all of one or nothing, run before and after."""
