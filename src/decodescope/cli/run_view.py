"""Drawing a run: header, one compact block a step, summary. Live and replayed runs are drawn by this one file."""

from collections.abc import Iterable

from rich.cells import cell_len
from rich.text import Text

from decodescope.analysis.metrics import run_metrics
from decodescope.cli.bars import bar
from decodescope.cli.console import draw_notes, line, out
from decodescope.cli.units import binary_bytes, count, milliseconds, number, percent
from decodescope.locale import translate as t
from decodescope.locale import translate_or
from decodescope.trace.records import Candidate, End, PromptToken, Run, Stage, Step
from decodescope.visible import token_text, visible

SHOWN_CANDIDATES = 5
_BAR_CELLS = 24
_BESIDE_BAR = 56  # cells of a candidate's line that are not the bar
_TOKEN_CELLS = 16
_TAIL_CELLS = 76
_SWITCHED_OFF = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


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
    loaded = {"architecture": run.architecture, "dtype": run.dtype, "device": run.device}
    out().print(line((t("run.header.model", model=run.model, **loaded), "bold")))
    source = translate_or(f"pull.source.{run.source}", run.source)
    out().print(line(t("run.header.origin", source=source, revision=run.revision or "-")))
    out().print(line(f"sha256 {run.sha256 or t('pull.not_hashed')}"))


def draw_settings(run: Run) -> None:
    """The sampling settings in force, and what the reader should know about them."""
    out().print(line(t("run.header.settings", settings=_settings(run))))
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
        off = _SWITCHED_OFF.get(setting.name, 0 if setting.name != "seed" else None)
        if setting.value != off or (setting.origin != "default" and not greedy):
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


def draw_step(step: Step, recent: str, candidates: int = SHOWN_CANDIDATES) -> None:
    """One step: what was chosen and how sure the model was, candidates, cost, and the end of the text so far."""
    out().print(_headline(step))
    for candidate in _shown(step, candidates):
        out().print(_candidate_line(candidate, candidate.token_id == step.token_id, final=bool(step.stages)))
    if step.stages:
        out().print(Text("    " + " → ".join(map(_stage, step.stages)), "dim"), soft_wrap=False)
    out().print(_costline(step))
    out().print(line("    ", (_tail(recent), "green")))


def _headline(step: Step) -> Text:
    marks = f" {t('run.step.forced')}" if step.forced else ""
    certainty = t("run.step.certainty", prob=percent(step.prob), rank=step.rank, entropy=number(step.entropy_nats))
    place = t("run.step.number", step=step.step)
    return line((f"{place}  ", "dim"), (token_text(step.text), "bold"), f"{marks}  ", (certainty, "dim"))


def _costline(step: Step) -> Text:
    timing, kv = step.timing, step.kv
    cost = t(
        "run.step.cost",
        tokens=kv.tokens,
        bytes=binary_bytes(kv.used_bytes),
        forward=milliseconds(timing.forward_s),
        total=milliseconds(timing.total_s),
    )
    return line(("    " + cost, "dim"))


def _stage(stage: Stage) -> str:
    """A sampler stage in a few words: its setting, how many it left, and how much of the mass."""
    value = stage.settings.get(stage.name)
    return t("run.stage", name=stage.name, value=value, left=count(stage.survivors), mass=percent(stage.kept_mass))


def _shown(step: Step, limit: int) -> list[Candidate]:
    """The first candidates, and the chosen one wherever it ranks."""
    first = [c for c in step.candidates if c.rank <= limit]
    return first + [c for c in step.candidates if c.rank > limit and c.token_id == step.token_id]


def _candidate_line(candidate: Candidate, chosen: bool, final: bool) -> Text:
    style = "bold green" if chosen else ""
    mark = "▶" if chosen else " "
    text = _fitted(token_text(candidate.text), _TOKEN_CELLS)
    parts: list[str | tuple[str, str]] = [
        f"   {mark}",
        (f"{candidate.rank:>3} ", "dim"),
        (text, style),
        (f"{candidate.token_id:>7} ", "dim"),
        f"{percent(candidate.prob_raw):>9} ",
        (_bar(candidate.prob_raw), "green" if chosen else "blue"),
    ]
    if final:
        gone = candidate.removed_by
        after = t("run.removed", stage=gone) if gone else f"→ {percent(candidate.prob_final)}"
        parts.append((f" {after}", "dim" if gone else ""))
    return line(*parts)


def _bar(share: float) -> str:
    """A bar as long as there is room for."""
    return bar(share, max(min(_BAR_CELLS, out().width - _BESIDE_BAR), 4))


def _fitted(text: str, cells: int) -> str:
    """Cut or pad to a width in terminal cells; Chinese characters take two."""
    while cell_len(text) > cells:
        text = text[:-2] + "…"
    return text + " " * (cells - cell_len(text))


def _tail(text: str) -> str:
    """The end of a text, on one line."""
    shown = visible(text)
    start, cells = len(shown), 0
    while start and cells + cell_len(shown[start - 1]) < _TAIL_CELLS:
        start -= 1
        cells += cell_len(shown[start])
    return ("…" if start else "") + shown[start:]


def draw_summary(run: Run, steps: list[Step], end: End) -> None:
    """How it ended, the whole text, and the run in a few numbers."""
    out().print(line((t("run.summary.text"), "bold")))
    out().print(Text(visible(end.text, keep_newlines=True)), soft_wrap=False)
    out().print(line((t("run.summary.title"), "bold")))
    for label, value in _summary_rows(run, steps, end):
        out().print(line("  ", (_fitted(label, 26), "dim"), value))


def _summary_rows(run: Run, steps: list[Step], end: End) -> Iterable[tuple[str, str]]:
    yield t("run.summary.finish"), _finish(end)
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
    if end.trace:
        yield t("run.summary.trace"), end.trace


def _finish(end: End) -> str:
    reason = translate_or(f"finish.{end.finish_reason}", end.finish_reason)
    if end.stop_string is not None:
        return t("finish.with_string", reason=reason, string=visible(end.stop_string))
    if end.stop_token_id is not None:
        return t("finish.with_id", reason=reason, id=end.stop_token_id)
    return f"{reason} ({end.error})" if end.error else reason
