"""Nodes as calls: views, effects on memory, modes, dead code, what may move."""
