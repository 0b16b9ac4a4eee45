"""Tokens in OpenAI's words: logprobs with exact bytes, in the form of chats and in that of completions."""

from collections.abc import Sequence
from typing import Any

from decodescope.analysis.logprobs import candidate_logprobs
from decodescope.trace.records import Step

LEAST_LOGPROB = -9999.0  # what OpenAI's servers say of what is next to impossible: JSON has no infinity


def token_logprob(step: Step, top: int, as_ids: bool) -> dict[str, Any]:
    """One token and its `top` most probable alternatives, itself among them where it is one of these."""
    ranked = candidate_logprobs(step)[:top] if top else []
    return {
        **_entry(step.token_id, step.text, step.bytes_hex, step.logprob_nats, as_ids),
        "top_logprobs": [_entry(c.token_id, c.text, c.bytes_hex, logprob, as_ids) for c, logprob in ranked],
    }


def side_by_side(steps: Sequence[Step], offsets: Sequence[int], top: int, as_ids: bool) -> dict[str, Any]:
    """The same for `/v1/completions`. Of alternatives that look alike the most probable one is named.

    A token that is not among its own alternatives is named beside them.
    """
    entries = [token_logprob(step, top, as_ids) for step in steps]
    return {
        "text_offset": list(offsets),
        "token_logprobs": [entry["logprob"] for entry in entries],
        "tokens": [entry["token"] for entry in entries],
        "top_logprobs": [_by_text(entry) for entry in entries],
        "bytes": [entry["bytes"] for entry in entries],
    }


def _entry(token_id: int, text: str, bytes_hex: str, logprob: float, as_ids: bool) -> dict[str, Any]:
    return {
        "token": f"token_id:{token_id}" if as_ids else text,
        "logprob": max(logprob, LEAST_LOGPROB),
        "bytes": list(bytes.fromhex(bytes_hex)),
    }


def _by_text(entry: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in (*entry["top_logprobs"], entry):
        found.setdefault(each["token"], each["logprob"])
    return found
