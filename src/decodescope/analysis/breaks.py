"""Break conditions: where stepping pauses. All of them look at the newest step of a branch.

entropy>NATS    its raw entropy
rank>N          the raw rank of the chosen token
margin<LOGITS   the distance between the two highest raw logits
token=TEXT      the chosen token has this text; a whole number also names an id
text=TEXT       the text of the branch contains this, and did not before
nonfinite       NaN or infinity was seen in the step
loop            the text goes round (see `analysis.repeats`), and did not before
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from decodescope.analysis.repeats import Loop, LoopFinder
from decodescope.errors import InputError
from decodescope.trace.records import Step

BreakName = Literal["entropy", "rank", "margin", "token", "text", "nonfinite", "loop"]
_SIGNS = {"entropy": ">", "rank": ">", "margin": "<", "token": "=", "text": "=", "nonfinite": "", "loop": ""}
_EXAMPLES = ("entropy>2.0", "rank>5", "margin<0.5", "token=TEXT", "text=TEXT", "nonfinite", "loop")
_SHOWN = 80  # characters of what was given, in a sentence about it


@dataclass(frozen=True, slots=True)
class BreakRule:
    """One condition as it was written: its `limit` in nats, ranks or logits, or the `text` that is looked for."""

    name: BreakName
    written: str
    limit: float = 0.0
    text: str = ""


class Breaks:
    """The conditions of a run, which may go back and fork between two questions."""

    def __init__(self, rules: Sequence[BreakRule]) -> None:
        self._rules = tuple(rules)
        self._finder = LoopFinder()

    def met(self, path: Sequence[Step], nonfinite: bool = False) -> BreakRule | None:
        """The first condition that holds, at the last step of `path`: those of the branch, at least one.

        `nonfinite` tells whether NaN or infinity was seen in that step.
        """
        return next((rule for rule in self._rules if self._holds(rule, path, nonfinite)), None)

    def _holds(self, rule: BreakRule, path: Sequence[Step], nonfinite: bool) -> bool:
        step = path[-1]
        match rule.name:
            case "entropy":
                return step.entropy_nats > rule.limit
            case "rank":
                return step.rank > rule.limit
            case "margin":
                return step.margin_logits < rule.limit
            case "token":
                return rule.text in (step.text, str(step.token_id))
            case "text":
                return _completes(path, rule.text)
            case "nonfinite":
                return nonfinite
            case "loop":
                return self._loop(path[:-1]) is None and self._loop(path) is not None

    def _loop(self, path: Sequence[Step]) -> Loop | None:
        self._finder.follow([step.token_id for step in path], [step.text for step in path])
        return self._finder.loop


def _completes(path: Sequence[Step], text: str) -> bool:
    """Whether `text` stands in the text of the branch and ends in what the last step added."""
    before = "".join(step.delta_text for step in path[:-1])
    return text in before[max(len(before) - len(text) + 1, 0) :] + path[-1].delta_text


def parse_break(text: str) -> BreakRule:
    """Read a condition as it stands above. Raises InputError, naming what is wrong and what is known."""
    word, sign, value = re.split(r"\s*([<>=]|$)", text, maxsplit=1)
    if word not in _SIGNS:
        raise InputError("break.unknown", text=text[:_SHOWN], known=", ".join(_EXAMPLES))
    if sign != _SIGNS[word] or bool(sign) != bool(value):
        example = next(example for example in _EXAMPLES if example.startswith(word))
        raise InputError("break.form", text=text[:_SHOWN], name=word, example=example)
    name = cast(BreakName, word)
    if sign in "<>" and sign:
        return BreakRule(name, text, limit=_limit(name, value))
    return BreakRule(name, text, text=value)


def _limit(name: BreakName, text: str) -> float:
    """A finite number above 0; for a rank a whole one."""
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not 0 < limit < math.inf or (name == "rank" and not limit.is_integer()):
        raise InputError("break.rank" if name == "rank" else "break.limit", name=name, value=text[:_SHOWN])
    return limit
