"""The tree of a run, from its trace alone: where branches part, and how probable each is as a whole."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from decodescope.sequences import common_length
from decodescope.trace.records import End, Step, Trace

THE_RUN = 0  # its number among the branches; forks count from 1


@dataclass(frozen=True, slots=True)
class Ending:
    """A branch that ends: `number` counts the forks of the trace from 1, 0 is the run itself."""

    number: int
    end: End


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps that follow one another, without a parting or an end between them; none before the first token.

    `depth` counts the partings at which its branch was not the one that goes on. `logprob_nats` is the sum of the
    raw log-probabilities of all tokens from the first of the run to the last of the stretch.
    """

    depth: int
    parted: bool  # its first token has siblings
    kept: bool  # on the branch that was kept
    steps: tuple[Step, ...]
    logprob_nats: float
    endings: tuple[Ending, ...]  # of the branches that end with its last token
    is_leaf: bool


@dataclass(frozen=True, slots=True)
class _Begin:
    """Where a stretch begins."""

    step: Step
    depth: int
    parted: bool
    logprob_nats: float  # of all tokens before


def stretches(trace: Trace) -> list[Stretch]:
    """The tree from top to bottom: behind a parting the branches that leave there, then the one that goes on.

    That is the branch that was kept, off it the one that was made first.
    """
    kept = {step.node for step in trace.path()}
    below, endings = _children(trace.steps), _endings(trace)
    found = []
    if None in endings:
        found.append(Stretch(0, False, True, (), 0.0, tuple(endings[None]), is_leaf=False))
    pending = _begins(below.get(None, []), kept, depth=0, logprob_nats=0.0)
    while pending:
        begin = pending.pop()
        steps = _followed(begin.step, below, endings)
        last, logprob = steps[-1].node, begin.logprob_nats + sum(step.logprob_nats for step in steps)
        ends, after = tuple(endings.get(last, ())), below.get(last, [])
        on_path = steps[0].node in kept
        found.append(Stretch(begin.depth, begin.parted, on_path, steps, logprob, ends, is_leaf=not after))
        pending += _begins(after, kept, begin.depth, logprob)
    return found


def _children(steps: Sequence[Step]) -> dict[int | None, list[Step]]:
    children = defaultdict(list)
    for step in steps:
        children[step.parent].append(step)
    return children


def _endings(trace: Trace) -> dict[int | None, list[Ending]]:
    """Where the run and its forks end: by node, None for those without a token."""
    found = defaultdict(list)
    numbered = list(enumerate((branch.end for branch in trace.branches), start=1))
    if trace.end is not None and trace.root is None:
        numbered.insert(0, (THE_RUN, trace.end))
    for number, end in numbered:
        found[end.node].append(Ending(number, end))
    return found


def _begins(siblings: Sequence[Step], kept: set[int], depth: int, logprob_nats: float) -> list[_Begin]:
    """What is still to be walked where siblings part, the last of it first: the one that goes on."""
    if not siblings:
        return []
    onward = next((step for step in siblings if step.node in kept), siblings[0])
    parted = len(siblings) > 1
    leaving = [_Begin(step, depth + 1, parted, logprob_nats) for step in siblings if step is not onward]
    return [_Begin(onward, depth, parted, logprob_nats), *reversed(leaving)]


def _followed(
    step: Step, below: Mapping[int | None, Sequence[Step]], endings: Mapping[int | None, Sequence[Ending]]
) -> tuple[Step, ...]:
    """A step and those behind it, up to the next parting or end."""
    steps = [step]
    while len(after := below.get(steps[-1].node, ())) == 1 and steps[-1].node not in endings:
        steps.append(after[0])
    return tuple(steps)


def parts_at(path: Sequence[Step], other: Sequence[Step]) -> int | None:
    """The first step at which two branches have different tokens; None where one is the beginning of the other."""
    same = common_length([step.token_id for step in path], [step.token_id for step in other])
    return path[same].step if same < min(len(path), len(other)) else None
