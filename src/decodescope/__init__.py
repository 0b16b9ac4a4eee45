"""decodescope: watch a language model choose every token."""

__version__ = "0.1.0"
