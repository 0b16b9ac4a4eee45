"""The sampling settings that a checkpoint brings along (generation_config.json)."""

import json
from pathlib import Path
from typing import Any

from decodescope.errors import InputError


def read_checkpoint_settings(path: Path) -> dict[str, Any]:
    """The keys of generation_config.json in the model folder; empty where there is none (GGUF files).

    Raises InputError for a file that is no JSON object.
    """
    file = path / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        keys = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError("config.not_json", path=file, reason=str(error)[:80]) from None
    if not isinstance(keys, dict):
        raise InputError("config.not_json", path=file, reason=type(keys).__name__)
    return keys
