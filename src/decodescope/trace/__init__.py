"""The record of a run: what it holds (records), how it lies on disk (store), how it leaves (export).

Nothing here imports torch, so that opening a saved run is instant.
"""
