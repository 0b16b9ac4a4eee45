"""A run leaves the house: JSON lines, the same that `run --json` prints."""

from typing import TextIO

from decodescope.trace.lines import Record, json_text, record_line
from decodescope.trace.records import Trace


def export_jsonl(trace: Trace, stream: TextIO) -> None:
    """Write the run, every step in the order it was made, the end, and the forks, one JSON object a line.

    `stream` should encode to UTF-8. A trace still being made has no end line.
    """
    records: list[Record] = [trace.run, *trace.steps]
    if trace.end:
        records.append(trace.end)
    for record in (*records, *trace.branches):
        stream.write(json_text(record_line(record)) + "\n")
