"""Speed and memory, measured in turn with what the machine gives; other engines in processes of their own."""
