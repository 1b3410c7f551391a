"""The door for structural changes of a graph: all of an edit or nothing of it, and nothing that a run refutes."""
