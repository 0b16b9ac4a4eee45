"""Saved runs as they are read: the trace, what was seen of inner values, the index of tensors."""

from dataclasses import replace
from itertools import chain
from pathlib import Path

from decodescope.errors import InputError
from decodescope.trace.ends import end_of
from decodescope.trace.opening import opened
from decodescope.trace.records import Step, Trace
from decodescope.trace.site_records import SiteSummary
from decodescope.trace.tables import SITE, TENSOR
from decodescope.trace.tensors import SavedTensor, block_file


def read_trace(folder: Path) -> Trace:
    """The run in a folder, whether it has ended, is still being written, or was killed.

    Without an end record the end is what `end_of` says of the branch of the last step, finish reason
    `interrupted`, and so is that of a fork that came to no end; every `End.trace` is `folder`. Raises InputError
    when the folder holds no run, a newer one, or a damaged one.
    """
    return _read(folder, bare=False)


def read_outline(folder: Path) -> Trace:
    """As `read_trace`, with steps that lack candidates and stages: ten times as fast."""
    return _read(folder, bare=True)


def read_steps(folder: Path, first: int) -> list[Step]:
    """The steps from node `first` on, in the order they were made: what is new of a run that is being written.

    Raises InputError as `read_trace` does.
    """
    with opened(folder) as reader:
        return reader.steps(first=first)


def _read(folder: Path, bare: bool) -> Trace:
    with opened(folder) as reader:
        run = reader.run()
        if run is None:
            raise InputError("trace.empty", path=folder)
        trace = Trace(run, reader.steps(bare))
        trace.end = reader.end(trace.steps)
        trace.branches = reader.branches(run, trace.steps)
    if trace.end is None:
        trace.end = end_of(run, trace.path(), "interrupted")
    trace.end = replace(trace.end, trace=str(folder))
    trace.branches = [replace(each, end=replace(each.end, trace=str(folder))) for each in trace.branches]
    return trace


def read_sites(folder: Path) -> list[SiteSummary]:
    """What the run itself saw of inner values on the branch that was kept, in the order of computation.

    A pass after which nothing could be chosen belongs to it too. Raises InputError as `read_trace` does.
    """
    trace = read_outline(folder)
    parents = {step.node: step.parent for step in trace.steps}
    saved: dict[int, list[SiteSummary]] = {}
    with opened(folder) as reader:
        forked = reader.first_fork_node()
        for _, node, *values in reader.rows(SITE):
            if forked is None or node < forked:
                saved.setdefault(node, []).append(SiteSummary(*values))
    # Tokens that follow the same one were chosen from the same pass, whichever of them it is saved under.
    after = {parents[node]: found for node, found in saved.items() if node in parents}
    unchosen = [found for node, found in saved.items() if node not in parents]
    return list(chain(*(after.get(step.parent, []) for step in trace.path()), *unchosen))


def saved_tensors(folder: Path) -> list[SavedTensor]:
    """The index of the tensors saved with a run. Raises InputError as `read_trace` does."""
    with opened(folder) as reader:
        return [SavedTensor(block_file(block), *values) for block, *values in reader.rows(TENSOR)]
