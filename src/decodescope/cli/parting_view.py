"""Why a row parts from another one, in sentences."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from decodescope.cli.units import percent
from decodescope.locale import translate as t
from decodescope.visible import token_text

if TYPE_CHECKING:
    from decodescope.experiments.sample_records import Parting


def parting_sentences(parting: "Parting", other: str) -> Iterable[str]:
    """What was chosen here and there with which probability, what made the difference, and what would undo it;
    `other` names the other row."""
    own, first = _name(parting.text, parting.token_id), _name(parting.first_text, parting.first_token_id)
    yield t("sample.parts", step=parting.step, own=own, first=first, other=other)
    for token, probs in (
        (first, (parting.first_prob_raw, parting.first_prob_there, parting.first_prob_here)),
        (own, (parting.prob_raw, parting.prob_there, parting.prob_here)),
    ):
        raw, there, here = map(percent, probs)
        yield t("sample.probs", token=token, raw=raw, there=there, here=here, other=other)
    yield f"{_cause(parting, own, first, other)} {_repair(parting, first, other)}".strip()


def _name(text: str | None, token_id: int) -> str:
    return t("sample.token", id=token_id) if text is None else f"“{token_text(text)}”"


def _cause(parting: "Parting", own: str, first: str, other: str) -> str:
    match parting.cause:
        case "removed":
            return t("sample.cause.removed", stage=parting.stage, first=first)
        case "lowered":
            return t("sample.cause.lowered", stage=parting.stage, own=own, first=first)
        case "highest":
            return t("sample.cause.highest", own=own)
        case "drawn":
            return t("sample.cause.drawn", other=other)
        case "other_seed":
            return t("sample.cause.other_seed")
        case "other_probs":
            return t("sample.cause.other_probs")
        case "by_hand":
            return t("sample.cause.by_hand", first=first)


def _repair(parting: "Parting", first: str, other: str) -> str:
    if parting.cause == "by_hand":
        return ""
    if not parting.repaired_by:
        return t("sample.no_repair", other=other)
    settings = t("sample.or").join(parting.repaired_by)
    return t("sample.repair", settings=settings, first=first, other=other)
