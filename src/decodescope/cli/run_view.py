"""Drawing a run around its steps: header and summary, the same for live and replayed runs."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from rich.text import Text

from decodescope.analysis.metrics import run_metrics
from decodescope.cli.console import draw_notes, line, out
from decodescope.cli.step_view import fitted
from decodescope.cli.units import binary_bytes, count, milliseconds, number
from decodescope.locale import translate as t
from decodescope.locale import translate_or
from decodescope.trace.records import GUARDS, End, PromptToken, Run, Step
from decodescope.trace.saved import saved_tensors
from decodescope.visible import token_text, visible

_SWITCHED_OFF = {
    "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": None,
    "sampler": "hf", "without": None,
}  # fmt: skip


def draw_header(run: Run) -> None:
    """What is about to run, and the prompt as it goes in, token by token."""
    draw_model(run)
    draw_settings(run)
    out().print(line((t("run.header.prompt", count=len(run.prompt_tokens)), "bold")))
    for row in _prompt_rows(run.prompt_tokens, out().width):
        out().print(row)
    draw_ids(run)


def draw_model(run: Run) -> None:
    """Which model, and where it came from."""
    dtype = t("run.header.weights", dtype=run.dtype, weights=run.weights) if run.weights else run.dtype
    if run.cache_dtype:
        dtype = t("run.header.cache", dtype=dtype, cache=run.cache_dtype)
    loaded = {"architecture": run.architecture, "dtype": dtype, "device": run.device}
    out().print(line((t("run.header.model", model=run.model, **loaded), "bold")))
    source = translate_or(f"pull.source.{run.source}", run.source)
    out().print(line(t("run.header.origin", source=source, revision=run.revision or "-")))
    out().print(line(f"sha256 {run.sha256 or t('pull.not_hashed')}"))


def draw_settings(run: Run) -> None:
    """The sampling settings in force, and what the reader should know about them."""
    out().print(line(t("run.header.settings", settings=_settings(run))))
    if run.guards:
        out().print(line(t("run.header.guards", guards=" ".join(run.guards))))
    draw_notes(run.notes)


def draw_ids(run: Run) -> None:
    """The ids of the prompt."""
    ids = " ".join(str(token.token_id) for token in run.prompt_tokens)
    out().print(Text(f"{t('run.header.ids')} [{ids}]", style="dim"), soft_wrap=False)


def _settings(run: Run) -> str:
    """The settings that are in force, each with its origin."""
    values = {s.name: s for s in run.settings}
    greedy = "temperature" in values and not values["temperature"].value
    named = [] if not greedy else [t("run.greedy")]
    for setting in run.settings:
        changed = setting.value != _SWITCHED_OFF.get(setting.name, 0)
        if setting.name != GUARDS and (changed or (setting.origin != "default" and not greedy)):
            origin = translate_or(f"origin.{setting.origin.replace(' ', '_')}", setting.origin)
            named.append(t("run.setting", name=setting.name, value=setting.value, origin=origin))
    return " · ".join(named)


def _prompt_rows(tokens: Iterable[PromptToken], width: int) -> Iterable[Text]:
    """The tokens between bars, lines broken only at a bar; the template's dim, injected control tokens marked."""
    row = line()
    for token in tokens:
        style = "red reverse" if token.injected else "dim" if token.role == "template" else "cyan"
        cell = line((token_text(token.text), style), ("│", "dim"))
        if row and row.cell_len + cell.cell_len > width:
            yield row
            row = line()
        row.append_text(cell)
    yield row


def content_text(run: Run) -> str:
    """The prompt without what the template added, a bar between tokens."""
    return "│".join(token_text(token.text) for token in run.prompt_tokens if token.role != "template")


def draw_summary(run: Run, steps: list[Step], end: End) -> None:
    """How it ended, the whole text, and the run in a few numbers."""
    out().print(line((t("run.summary.text"), "bold")))
    out().print(Text(visible(end.text, keep_newlines=True)), soft_wrap=False)
    out().print(line((t("run.summary.title"), "bold")))
    for label, value in _summary_rows(run, steps, end):
        out().print(line("  ", (fitted(label, 26), "dim"), value))


def _summary_rows(run: Run, steps: list[Step], end: End) -> Iterable[tuple[str, str]]:
    yield t("run.summary.finish"), finish_text(end)
    yield t("run.summary.tokens"), t("run.summary.token_counts", prompt=end.prompt_tokens, new=end.new_tokens)
    if not steps:
        return
    metrics = run_metrics(run, steps)
    if end.decode_tokens_per_s is not None:
        yield t("run.summary.speed"), t("run.summary.per_second", value=number(end.decode_tokens_per_s, 2))
    if end.ttft_s is not None:
        prefill = milliseconds(metrics.prefill_s)
        yield t("run.summary.ttft"), t("run.summary.ttft_value", ttft=milliseconds(end.ttft_s), prefill=prefill)
    yield t("run.summary.entropy"), t("run.summary.nats", value=number(metrics.entropy_nats_mean))
    yield t("run.summary.perplexity"), number(metrics.perplexity)
    if end.peak_rss_bytes is not None:
        yield t("run.summary.peak"), binary_bytes(end.peak_rss_bytes)
    tokens, per_token = metrics.cache_tokens, count(run.kv_bytes_per_token)
    formula = count(metrics.cache_formula_bytes)
    yield t("run.summary.cache"), t("run.summary.bytes", value=count(metrics.cache_bytes))
    yield t("run.summary.formula"), t("run.summary.product", tokens=tokens, per_token=per_token, value=formula)
    if run.guards:
        yield t("run.summary.guards"), _stepped_in(steps)
    if end.trace:
        yield from _logits(Path(end.trace), steps)
        yield t("run.summary.trace"), end.trace


def _stepped_in(steps: list[Step]) -> str:
    """What guards did, and how often."""
    done = Counter((each.guard, each.action) for step in steps for each in step.interventions)
    told = [
        t("run.summary.guard_count", guard=guard, count=times, action=t(f"guard.did.{action}"))
        for (guard, action), times in done.items()
    ]
    return " · ".join(told) or t("run.summary.guards_idle")


def _logits(folder: Path, steps: list[Step]) -> Iterable[tuple[str, str]]:
    """Of how many steps raw logits were kept, where those of others did not fit."""
    nodes = {tensor.node for tensor in saved_tensors(folder) if tensor.name == "logits"}
    kept = [step for step in steps if step.node in nodes]
    if kept and len(kept) < len(steps):
        yield t("run.summary.logits"), t("run.summary.logits_of", kept=len(kept), steps=len(steps))


def finish_text(end: End) -> str:
    """Why a run or fork ended, in words."""
    reason = translate_or(f"finish.{end.finish_reason}", end.finish_reason)
    if end.stop_guard is not None:
        return t("finish.with_guard", guard=end.stop_guard)
    if end.stop_string is not None:
        return t("finish.with_string", reason=reason, string=visible(end.stop_string))
    if end.stop_token_id is not None:
        return t("finish.with_id", reason=reason, id=end.stop_token_id)
    return f"{reason} ({end.error})" if end.error else reason
