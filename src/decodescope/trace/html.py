"""A run, and what a recording saw, as fragments of HTML for a notebook."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from decodescope.locale import translate as t
from decodescope.locale import translate_or
from decodescope.trace.markup import Markup, cell, ends, joined, table, tag, text, view
from decodescope.trace.records import Candidate, End, Intervention, PromptToken, Run, Step, Trace
from decodescope.trace.site_records import SiteSummary, address
from decodescope.visible import token_text

SHOWN_PROMPT, SHOWN_TOKENS, SHOWN_STEPS, SHOWN_SITES = (60, 60), (1200, 300), (40, 12), (60, 20)  # first, last
_SHOWN_CANDIDATES = 5
_LINE_POINTS = 400
_STEP_HEADS = ("html.step", "html.token", "html.prob", "html.rank", "html.entropy", "html.time", "html.candidates")
_SITE_HEADS = (
    "html.step", "html.site", "html.shape", "html.dtype", "html.spread", "html.mean", "html.std", "html.min",
    "html.max", "html.l2", "html.zeros", "html.nonfinite",
)  # fmt: skip
_LEFT = {"html.token", "html.candidates", "html.site", "html.shape", "html.dtype", "html.spread"}
_NUMBER = "dsc-num"


def trace_html(trace: Trace) -> str:
    """A whole run: model, prompt, the text with every token coloured, the steps of the branch kept, the end.

    Of a long run the first and the last tokens and steps are shown, and how many are left out. Of forks it is told
    how many there are.
    """
    path = trace.path()
    return view(
        _header(trace.run),
        _part("html.prompt", count=len(trace.run.prompt_tokens)),
        _shortened(map(_prompt_token, trace.run.prompt_tokens), SHOWN_PROMPT),
        _part("html.answer", count=len(path)),
        _shortened(map(_step_token, path), SHOWN_TOKENS),
        _legend(),
        *_entropy_line(path),
        _part("html.steps"),
        _steps(path),
        *_interventions(path),
        _end(trace.end) if trace.end else tag("div", text(t("html.no_end")), class_="dsc-warn"),
        *([_part("html.branches", count=len(trace.branches))] if trace.branches else []),
    )


def _header(run: Run) -> Markup:
    named = {"model": run.model, "architecture": run.architecture, "dtype": run.dtype, "device": run.device}
    title = tag("div", text(t("run.header.model", **named)), class_="dsc-title")
    facts = [f"{s.name} {s.value}" for s in run.settings if s.origin != "default" or s.name == "temperature"]
    under = tag("div", text(" · ".join((run.started_at, *facts))), class_="dsc-dim")
    notes = (note.partition(":") for note in run.notes)
    told = (translate_or(key, key + colon + detail).replace("{detail}", detail) for key, colon, detail in notes)
    return joined((title, under, *(tag("div", text(f"! {note}"), class_="dsc-warn") for note in told)))


def _part(key: str, **values: object) -> Markup:
    return tag("div", text(t(key, **values)), class_="dsc-part")


def _shortened(tokens: Iterable[Markup], shown: tuple[int, int]) -> Markup:
    first, left_out, last = ends(list(tokens), *shown)
    gap = tag("span", text(t("html.left_out_tokens", count=left_out)), class_="dsc-dim")
    return tag("div", *first, *([gap] if left_out else []), *last, class_="dsc-text")


def _prompt_token(token: PromptToken) -> Markup:
    style = "dsc-warn" if token.injected else "dsc-template" if token.role == "template" else ""
    hint = f"{token.token_id} · {token.role}"
    return _broken(token.text, class_=f"dsc-token {style}".rstrip(), title=hint)


def _step_token(step: Step) -> Markup:
    hint = t("html.hint", step=step.step, prob=_percent(step.prob), rank=step.rank, id=step.token_id)
    return _broken(step.text, class_="dsc-token", title=hint, style=_doubt(step.prob))


def _broken(token: str, **attributes: str | float) -> Markup:
    """A token in running text: where it ends a line, so does the line."""
    return joined((tag("span", text(token or "∅"), **attributes), Markup("\n" if "\n" in token else "")))


def _doubt(prob: float) -> str:
    """The less probable, the deeper the colour."""
    return f"background:rgba(240,110,20,{0.75 * (1 - _share(prob)) ** 1.5:.2f})"


def _legend() -> Markup:
    shown = (
        tag("span", text(f" {_percent(prob)} "), class_="dsc-token", style=_doubt(prob))
        for prob in (1.0, 0.75, 0.5, 0.25, 0.01)
    )
    return tag("div", text(t("html.legend")), text(" "), *shown, class_="dsc-dim")


def _entropy_line(path: Sequence[Step]) -> Iterable[Markup]:
    """Entropy along the steps; where there are more of them than points, the highest of each stretch."""
    entropies = [step.entropy_nats if math.isfinite(step.entropy_nats) else 0.0 for step in path]
    if len(entropies) < 2:
        return
    points = min(len(entropies), _LINE_POINTS)
    cuts = pairwise(i * len(entropies) // points for i in range(points + 1))
    heights = [max(entropies[start:stop]) for start, stop in cuts]
    top = max(heights) or 1.0
    places = " ".join(f"{i},{36 - 34 * height / top:.1f}" for i, height in enumerate(heights))
    line = tag(
        "polyline", points=places, fill="none", stroke="rgb(34,139,230)", stroke_width=1.5,
        vector_effect="non-scaling-stroke",
    )  # fmt: skip
    yield _part("html.entropy_line", most=f"{max(entropies):.2f}")
    yield tag("svg", line, viewBox=f"0 0 {points - 1} 37", preserveAspectRatio="none", width="100%", height=37)


def _steps(path: Sequence[Step]) -> Markup:
    first, left_out, last = ends(path, *SHOWN_STEPS)
    rows = (*map(_step_row, first), *_left_out(left_out, len(_STEP_HEADS)), *map(_step_row, last))
    return table(_heads(_STEP_HEADS), rows)


def _step_row(step: Step) -> Markup:
    mark = " ✎" if step.forced else ""
    chips = (_chip(candidate, candidate.token_id == step.token_id) for candidate in _shown(step))
    return tag(
        "tr",
        cell(step.step, _NUMBER),
        tag("td", tag("div", text(token_text(step.text) + mark), class_="dsc-clip")),
        cell(_percent(step.prob), _NUMBER),
        cell(step.rank, _NUMBER),
        cell(f"{step.entropy_nats:.3f}", _NUMBER),
        cell(f"{step.timing.total_s * 1000:.1f}", _NUMBER),
        tag("td", tag("div", *chips, class_="dsc-chips")),
    )


def _shown(step: Step) -> Sequence[Candidate]:
    """The most probable ones; the chosen one takes the last place where it is none of them."""
    first = step.candidates[:_SHOWN_CANDIDATES]
    chosen = [c for c in step.candidates[_SHOWN_CANDIDATES:] if c.token_id == step.token_id]
    return (*first[: _SHOWN_CANDIDATES - len(chosen)], *chosen)


def _chip(candidate: Candidate, chosen: bool) -> Markup:
    """A candidate whose background is its bar."""
    filled = f"{100 * _share(candidate.prob_raw):.1f}%"
    colour = "rgba(34,139,230,.38)" if chosen else "rgba(134,142,150,.3)"
    return tag(
        "div",
        tag("span", text(token_text(candidate.text)), class_="dsc-clip"),
        tag("span", text(_percent(candidate.prob_raw)), class_="dsc-dim"),
        class_="dsc-chip dsc-chosen" if chosen else "dsc-chip",
        style=f"background:linear-gradient(90deg,{colour} {filled},transparent {filled})",
        title=t("html.candidate", rank=candidate.rank, id=candidate.token_id, logit=f"{candidate.logit:.3f}"),
    )


def _interventions(path: Sequence[Step]) -> Iterable[Markup]:
    """What guards did, a line each."""
    told = [_intervention(step.step, each) for step in path for each in step.interventions]
    if told:
        yield joined((_part("html.interventions"), _listed(told, "dsc-warn")))


def _intervention(step: int, done: Intervention) -> str:
    action = t(f"guard.action.{done.action}", temperature=done.temperature)
    unit = t("guard.unit.tokens") if done.guard == "loop" else t("guard.unit.nats")
    seen = {"measured": f"{done.measured:.4g}", "threshold": f"{done.threshold:.4g}", "unit": unit}
    return t("guard.intervention", step=step, guard=done.guard, action=action, **seen)


def _end(end: End) -> Markup:
    reason = translate_or(f"finish.{end.finish_reason}", end.finish_reason)
    facts = [(t("run.summary.finish"), f"{reason} ({end.error})" if end.error else reason)]
    counts = t("run.summary.token_counts", prompt=end.prompt_tokens, new=end.new_tokens)
    facts.append((t("run.summary.tokens"), counts))
    if end.ttft_s is not None:
        facts.append((t("run.summary.ttft"), f"{end.ttft_s * 1000:.1f} ms"))
    if end.decode_tokens_per_s is not None:
        speed = t("run.summary.per_second", value=f"{end.decode_tokens_per_s:.2f}")
        facts.append((t("run.summary.speed"), speed))
    if end.trace:
        facts.append((t("run.summary.trace"), end.trace))
    rows = (tag("tr", cell(name), cell(value)) for name, value in facts)
    return joined((_part("html.end"), tag("table", tag("tbody", *rows), class_="dsc-facts")))


def sites_html(
    summaries: Sequence[SiteSummary], kept: Mapping[str, Sequence[int]], dropped: Mapping[str, int]
) -> str:
    """What a recording saw: its summaries in the order of computation, the first and the last of many.

    `kept` are the steps in which each site was kept whole, `dropped` the bytes of each that did not fit.
    """
    parts = [tag("div", text(t("html.recording", summaries=len(summaries), kept=len(kept))), class_="dsc-title")]
    if summaries:
        first, left_out, last = ends(summaries, *SHOWN_SITES)
        rows = (*map(_site_row, first), *_left_out(left_out, len(_SITE_HEADS)), *map(_site_row, last))
        parts += [_part("html.summaries"), table(_heads(_SITE_HEADS), rows)]
    if kept:
        lines = [f"{name} [{_numbers(steps)}]" for name, steps in kept.items()]
        parts += [_part("html.kept"), _listed(lines, "")]
    if dropped:
        lines = [t("html.dropped_one", name=name, bytes=size) for name, size in dropped.items()]
        parts += [_part("html.dropped"), _listed(lines, "dsc-warn")]
    return view(*parts)


def _site_row(found: SiteSummary) -> Markup:
    figures = (found.mean, found.std, found.min, found.max, found.l2)
    return tag(
        "tr",
        cell(found.step, _NUMBER),
        cell(address(found.site, found.layer) + (" *" if found.recomputed else "")),
        cell("×".join(map(str, found.shape))),
        cell(found.dtype),
        tag("td", _spread(found)),
        *(cell(f"{figure:.4g}", _NUMBER) for figure in figures),
        cell(_percent(found.zeros), _NUMBER),
        cell(found.nonfinite, _NUMBER),
        **({"class_": "dsc-bad"} if found.nonfinite else {}),
    )


def _spread(found: SiteSummary) -> Markup:
    """From the least to the greatest value, around the mean one standard deviation; zero in the middle."""
    reach = max(abs(found.min), abs(found.max))
    if not (0 < reach < math.inf and math.isfinite(found.mean) and math.isfinite(found.std)):
        return text("-")
    low, high, least, most = (
        60 + 58 * max(-1.0, min(1.0, value / reach))
        for value in (found.min, found.max, found.mean - found.std, found.mean + found.std)
    )
    axis = tag("line", x1=60, x2=60, y1=0, y2=14, stroke="currentColor", stroke_opacity=0.35)
    whole = tag("line", x1=f"{low:.1f}", x2=f"{high:.1f}", y1=7, y2=7, stroke="rgb(34,139,230)", stroke_width=1.5)
    width = f"{max(most - least, 1.0):.1f}"
    box = tag(
        "rect", x=f"{least:.1f}", y=3, width=width, height=8, rx=2, fill="rgb(34,139,230)", fill_opacity=0.55
    )
    return tag("svg", axis, whole, box, width=120, height=14)


def _listed(lines: Sequence[str], style: str) -> Markup:
    first, left_out, last = ends(lines, *SHOWN_SITES)
    gap = [t("html.left_out", count=left_out)] if left_out else []
    return joined(tag("div", text(line), class_=style) for line in (*first, *gap, *last))


def _numbers(steps: Sequence[int]) -> str:
    """The steps themselves, or the first and the last of many."""
    first, left_out, last = ends([str(step) for step in steps], 8, 1)
    return ", ".join((*first, *(["…"] if left_out else []), *last))


def _left_out(count: int, columns: int) -> Iterable[Markup]:
    if count:
        yield tag("tr", tag("td", text(t("html.left_out", count=count)), colspan=columns, class_="dsc-dim"))


def _heads(keys: Sequence[str]) -> list[tuple[str, str]]:
    return [(t(key), "" if key in _LEFT else _NUMBER) for key in keys]


def _share(prob: float) -> float:
    return min(max(prob, 0.0), 1.0) if math.isfinite(prob) else 0.0


def _percent(prob: float) -> str:
    """A probability as a percentage; a small chance is not rounded away."""
    value = 100 * prob
    if 0 < value < 0.01:
        return "<0.01 %"
    return f"{value:.{2 if 0 < value < 10 else 1}f} %"
