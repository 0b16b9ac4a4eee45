"""File formats read without torch, hostile files included."""
