"""Layers that compute the same from other tensors: found, and computed by one region that is called for each."""
