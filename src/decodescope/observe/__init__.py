"""Beside the path: live values become trace records here. Nothing in this room changes a value."""
