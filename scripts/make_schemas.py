"""Write the JSON Schemas of what `--json` prints into docs/schemas, from the records themselves.

`--check` writes nothing and exits 1 when a file is out of date.
"""

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from decodescope.catalogue import ModelCard, Pulled, Tokenization
from decodescope.experiments.attention_records import AttentionReport
from decodescope.experiments.bench.records import BenchReport
from decodescope.experiments.cache_records import CacheReport
from decodescope.experiments.conversation import Turn
from decodescope.experiments.fork_records import ForkReport
from decodescope.experiments.forward_records import ForwardReport
from decodescope.experiments.lens_records import LensReport
from decodescope.experiments.sample_records import SampleReport
from decodescope.monitor.watching import Reading
from decodescope.trace.lines import NONFINITE, TYPES

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "schemas"
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_NONFINITE = {"enum": list(NONFINITE)}


def schemas() -> dict[str, dict[str, Any]]:
    """File name -> schema: every key is required, no other is allowed."""
    lines = {f"{name}-line.json": _line_schema(name, record) for name, record in TYPES.items()}
    documents = {
        "tokens.json": Tokenization,
        "model.json": ModelCard,
        "pull.json": Pulled,
        "kv.json": CacheReport,
        "lens.json": LensReport,
        "attention.json": AttentionReport,
        "forward.json": ForwardReport,
        "fork.json": ForkReport,
        "sample.json": SampleReport,
        "bench.json": BenchReport,
        "turn.json": Turn,
        "monitor.json": Reading,
    }
    return lines | {name: _document_schema(name, record) for name, record in documents.items()}


def text(schema: dict[str, Any]) -> str:
    """A schema as it lies in its file."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def main() -> int:
    """Write or check every file; the exit code."""
    stale = [name for name, schema in schemas().items() if _content(FOLDER / name) != text(schema)]
    if "--check" in sys.argv[1:]:
        print("\n".join(f"out of date: docs/schemas/{name}" for name in stale), file=sys.stderr)
        return 1 if stale else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in stale:
        (FOLDER / name).write_text(text(schemas()[name]), encoding="utf-8")
    return 0


def _content(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _line_schema(name: str, record: Any) -> dict[str, Any]:
    schema: dict[str, Any] = TypeAdapter(record).json_schema(mode="serialization")
    schema["properties"] = {"type": {"const": name}, **schema["properties"]}
    for definition in (schema, *schema.get("$defs", {}).values()):
        _make_strict(definition)
    schema["properties"]["row"] = {"type": "integer", "minimum": 0, "description": "only in a batch (--prompts)"}
    return {"$schema": _DIALECT, "$id": f"{name}-line.json", **schema}


def _document_schema(name: str, record: Any) -> dict[str, Any]:
    schema: dict[str, Any] = TypeAdapter(record).json_schema(mode="serialization")
    for definition in (schema, *schema.get("$defs", {}).values()):
        _make_strict(definition)
    return {"$schema": _DIALECT, "$id": name, **schema}


def _make_strict(definition: dict[str, Any]) -> None:
    properties: dict[str, Any] = definition["properties"]
    definition["required"] = list(properties)
    definition["additionalProperties"] = False
    for name, value in properties.items():
        value.pop("default", None)
        value.pop("title", None)  # only repeats the name
        properties[name] = _with_nonfinite(value)


def _with_nonfinite(value: dict[str, Any]) -> dict[str, Any]:
    """A number that JSON cannot hold is written as its name; see docs/trace-format.md."""
    if "items" in value:
        return value | {"items": _with_nonfinite(value["items"])}
    options = value.get("anyOf", [value])
    if {"type": "number"} not in [{"type": option.get("type")} for option in options]:
        return value
    if {"type": "string"} in options:  # a setting: finite by rule
        return value
    rest = {key: item for key, item in value.items() if key not in ("anyOf", "type")}
    return rest | {"anyOf": [*({"type": o["type"]} for o in options), _NONFINITE]}


if __name__ == "__main__":
    raise SystemExit(main())
