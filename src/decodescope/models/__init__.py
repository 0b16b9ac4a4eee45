"""Finding and fetching models: whatever the user calls a model, one `ModelFiles` comes back."""

from decodescope.models.find import find_model
from decodescope.models.hashes import hash_model
from decodescope.models.records import ModelFiles, Report, describe, silent

__all__ = ["ModelFiles", "Report", "describe", "find_model", "hash_model", "silent"]
