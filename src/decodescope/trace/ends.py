"""How a branch ended: one definition for every run and fork, live, saved or killed."""

from collections.abc import Sequence
from dataclasses import replace

from decodescope.trace.records import End, FinishReason, Run, Step


def end_of(
    run: Run,
    path: Sequence[Step],
    reason: FinishReason,
    text: str | None = None,
    stop_string: str | None = None,
    error: str | None = None,
) -> End:
    """The end of the branch `path`, as far as its steps tell; `peak_rss_bytes` and `trace` stay None.

    `text` is what was printed, where that is more than the steps' `delta_text` (held-back text).
    """
    last = path[-1] if path else None
    decode_s = sum(step.timing.total_s for step in path[1:])
    guard = stopping_guard(reason, last)
    return End(
        finish_reason=reason,
        stop_token_id=_stop_token(run, last, guard) if reason == "stop" and stop_string is None else None,
        text="".join(step.delta_text for step in path) if text is None else text,
        prompt_tokens=len(run.prompt_tokens),
        new_tokens=len(path),
        ttft_s=path[0].timing.forward_s + path[0].timing.sample_s if path else None,
        decode_tokens_per_s=(len(path) - 1) / decode_s if decode_s > 0 else None,
        peak_rss_bytes=None,
        error=error,
        stop_string=stop_string,
        node=last.node if last else None,
        stop_guard=guard,
    )


def of_fork(end: End, run: Run, path: Sequence[Step], first: int) -> End:
    """The end of a fork of `run`, whose times are those of its own steps: the ones of `path` from `first` on."""
    own = end_of(run, path[first:], end.finish_reason)
    return replace(end, ttft_s=own.ttft_s, decode_tokens_per_s=own.decode_tokens_per_s)


def stopping_guard(reason: FinishReason, last: Step | None) -> str | None:
    """The guard that ended a branch with `reason` at its last step: the first that acted `stop` there."""
    if reason != "stop" or last is None:
        return None
    return next((each.guard for each in last.interventions if each.action == "stop"), None)


def _stop_token(run: Run, last: Step | None, guard: str | None) -> int | None:
    """The token that stopped a branch; where a guard stopped it, only if it is one that would have."""
    if last is None or (guard is not None and last.token_id not in run.stop_ids):
        return None
    return last.token_id
