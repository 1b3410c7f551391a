"""Choosing, remembering and telling: registry, selection, reports, events, caches."""
