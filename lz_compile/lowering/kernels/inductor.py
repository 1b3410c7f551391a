"""Leave the subgraph as it is and let Inductor compile it: always a candidate, for every op."""
