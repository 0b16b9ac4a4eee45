"""Other engines on the same file and ids, each in a process of its own; nobody else may import their libraries."""
