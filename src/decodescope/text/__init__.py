"""Text and ids: the tokenizer, the chat template, and printable text from a stream of tokens."""
