"""How each tool decodes greedily and keeps inner values, one module a tool."""
