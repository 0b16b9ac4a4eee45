"""Rows as a Parquet file: a column for every field and every setting, so that other tools can group by them."""

import errno
import os
from contextlib import suppress
from dataclasses import asdict, fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from decodescope.errors import InputError
from decodescope.experiments.sample_records import SampleReport, SampleRow
from decodescope.sampling.params import SamplingParams

if TYPE_CHECKING:
    import pyarrow

_OF_ALL = ("model", "dtype", "prompt")  # repeated in every row, for files that are joined


def check_parquet(path: Path) -> None:
    """Refuse at once what could not be written later. Raises InputError."""
    if find_spec("pyarrow") is None:
        raise InputError("sample.no_pyarrow")
    if path.is_dir() or not path.parent.is_dir():
        raise InputError("sample.parquet", path=path, reason=_reason(path))


def write_parquet(path: Path, report: SampleReport) -> None:
    """Write the rows, replacing the file at once when it is whole. Raises InputError."""
    check_parquet(path)
    import pyarrow
    from pyarrow import parquet

    common = {name: getattr(report, name) for name in _OF_ALL}
    records = [{**common, **_flat(row)} for row in report.rows]
    temporary = path.with_name(f".decodescope-{os.getpid()}.part")
    try:
        parquet.write_table(pyarrow.Table.from_pylist(records, schema=_schema()), temporary)
        temporary.replace(path)
    except OSError as fault:
        raise InputError("sample.parquet", path=path, reason=fault.strerror or fault) from None
    finally:
        with suppress(OSError):
            temporary.unlink()


def _reason(path: Path) -> str:
    return os.strerror(errno.EISDIR if path.is_dir() else errno.ENOENT)


def _flat(row: SampleRow) -> dict[str, Any]:
    """The fields of a row, its settings among them."""
    named = asdict(row)
    return {**named, **named.pop("settings")}


def _schema() -> "pyarrow.Schema":
    import pyarrow

    hints = get_type_hints(SampleRow)
    del hints["settings"]
    settings = {name: _setting_type(name) for name in SamplingParams().values() if name != "seed"}
    columns = {**dict.fromkeys(_OF_ALL, str), **settings, **hints}
    return pyarrow.schema([(name, _arrow(kind)) for name, kind in columns.items()])


def _setting_type(name: str) -> Any:
    return str if name == "without" else get_type_hints(SamplingParams)[name]  # joined by commas


def _arrow(kind: Any) -> "pyarrow.DataType":
    """The column type of a record's annotation; every column may be null."""
    import pyarrow

    plain = {int: pyarrow.int64, float: pyarrow.float64, str: pyarrow.string, bool: pyarrow.bool_}
    inner = [each for each in get_args(kind) if each is not NoneType and each is not Ellipsis]
    if kind in plain:
        return plain[kind]()
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return pyarrow.struct([(field.name, _arrow(hints[field.name])) for field in fields(kind)])
    if get_origin(kind) is tuple:
        return pyarrow.list_(_arrow(inner[0]))
    return pyarrow.string() if get_origin(kind) is Literal else _arrow(inner[0])
