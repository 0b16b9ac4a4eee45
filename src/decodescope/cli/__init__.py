"""The command line: a view. It parses, draws and speaks; everything it shows comes from the floors below."""
