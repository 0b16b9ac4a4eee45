"""Runs of runs: they drive sessions and hand back plain records."""
