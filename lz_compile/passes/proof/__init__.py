"""The room for everything that is found out by running: excerpts of graphs, at their own sizes or at others."""
