"""The forward pass and what it needs: configuration, rotary tables, KV cache, checkpoint, cost."""
