"""Nodes as calls: views, effects on memory, modes, snapshots, refusals."""
