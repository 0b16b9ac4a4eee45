"""Fragments for notebooks: well-formed, without script, nothing in them obeyed, bounded however long the run."""

import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_records import (
    BRANCHES,
    ENDS,
    MEASURED,
    RUNS,
    TEXT,
    chain,
    maybe,
    plain_branch,
    plain_end,
    plain_intervention,
    plain_run,
    plain_step,
    trees,
)

from decodescope import Session
from decodescope.locale import set_language
from decodescope.trace.html import sites_html, trace_html
from decodescope.trace.markup import tag, text
from decodescope.trace.records import Step, Trace
from decodescope.trace.site_records import SiteSummary
from tiny_model import make_tiny_model

TAGS = {
    "div", "span", "style", "table", "thead", "tbody", "tr", "th", "td", "svg", "polyline", "line", "rect",
}  # fmt: skip
HOSTILE = (
    "<img src=x onerror=alert(1)>", "</table></div>", "<script>alert(1)</script>", '" onmouseover="alert(1)', "' x='",
    "</style><style>*{display:none}", "&lt;b&gt;", "\u202eevil\u2066", "\x00\x1b[2J", "</span\n>", "]]><!--", "{0}{x}",
    "\ud800",
)  # fmt: skip
COMMANDING = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
SITES = st.builds(
    SiteSummary, st.integers(0, 9), maybe(st.integers(0, 9)), TEXT, st.tuples(st.integers(0, 9)), TEXT, st.integers(0, 9),
    *[MEASURED] * 8, st.integers(0, 9), st.booleans(),
)  # fmt: skip


class Page(HTMLParser):
    """Reads a fragment strictly: every element known and closed in order, no attribute that acts or fetches."""

    def __init__(self, fragment: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.hints: list[str] = []
        self.styles = ""
        self.rows = 0
        self.feed(fragment)
        self.close()
        assert not self.open and not COMMANDING.search(fragment)
        fragment.encode()

    def handle_starttag(self, name, attributes):
        assert name in TAGS, name
        self.open.append(name)
        self.rows += name == "tr"
        for key, value in attributes:
            assert not key.startswith("on") and key not in ("href", "src", "id", "xlink:href"), key
            if key == "style":
                assert re.fullmatch(r"background:(rgba\([\d.,]+\)|linear-gradient\([\w.,()%\- ]+\))", value), value
            if key == "class":
                assert all(part.startswith("dsc") for part in value.split()), value
            if key == "title":
                self.hints.append(value)

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        if self.open[-1] == "style":
            self.styles += data
        else:
            self.texts.append(data)

    def handle_comment(self, data):
        raise AssertionError(data)

    handle_decl = handle_pi = unknown_decl = handle_comment

    @property
    def text(self) -> str:
        return "".join(self.texts)


def hostile_trace() -> Trace:
    run, evil = plain_run(), " ".join(HOSTILE[:-1])
    tokens = tuple(replace(run.prompt_tokens[0], text=bad, role=bad) for bad in HOSTILE)
    steps = [
        replace(
            step, text=bad, delta_text=bad,
            candidates=tuple(replace(c, text=bad) for c in step.candidates),
            interventions=(replace(plain_intervention(), guard=bad),),
        )
        for step, bad in zip(chain(len(HOSTILE)), HOSTILE, strict=True)
    ]  # fmt: skip
    run = replace(
        run, model=evil, dtype=evil, started_at=evil, prompt_tokens=tokens, notes=(evil, "note.observed:" + evil)
    )
    end = replace(plain_end(), error=evil, trace=evil, stop_guard=evil)
    return Trace(run, steps, end, [replace(plain_branch(0), started_at=evil)])


def steps_of(count: int) -> list[Step]:
    return [plain_step(n, n - 1 if n else None, candidates=6) for n in range(count)]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_hostile_run_is_read_and_not_obeyed(language):
    set_language(language)
    page = Page(trace_html(hostile_trace()))
    for shown in (
        "<img src=x onerror=alert(1)>",
        "</table></div>",
        "&lt;b&gt;",
        "⟨U+202E⟩evil⟨U+2066⟩",
        "␀␛[2J",
        "{0}{x}",
    ):
        assert shown in page.text


@given(RUNS, trees(), maybe(ENDS), st.lists(BRANCHES, max_size=2))
@settings(deadline=None)
def test_any_run_becomes_a_well_formed_fragment(run, steps, end, branches):
    set_language("en")
    Page(trace_html(Trace(run, steps, end and replace(end, node=steps[-1].node if steps else None), branches)))


@pytest.mark.parametrize(
    ("language", "told", "forks"),
    [
        (
            "en",
            "step 1: guard loop measured 12, threshold 8 (repeated tokens): temperature 1.25 from the next step on",
            "2 fork(s) were",
        ),
        (
            "zh",
            "第 1 步：守卫 loop 测得 12，阈值 8（重复的 token 数）：从下一步起温度为 1.25",
            "此运行另有 2 个分叉",
        ),
    ],
)
def test_what_guards_did_and_how_many_forks_there_are_is_told(language, told, forks):
    set_language(language)
    steps = chain(3)
    acted = replace(plain_intervention("temperature"), temperature=1.25)
    steps[1] = replace(steps[1], interventions=(acted,))
    trace = Trace(plain_run(), steps, plain_end(), [plain_branch(0), plain_branch(1)])
    page = Page(trace_html(trace))
    assert told in page.texts and forks in page.text
    plain = Page(trace_html(Trace(plain_run(), chain(3), plain_end())))
    assert "loop" not in plain.text and forks not in plain.text


def test_a_guard_that_acts_at_every_step_does_not_fill_the_page():
    set_language("en")
    steps = [replace(step, interventions=(plain_intervention(),)) for step in steps_of(3000)]
    page = Page(trace_html(Trace(plain_run(), steps, plain_end())))
    assert page.text.count("guard loop measured") == 80 and "2,920" in page.text


@given(
    st.lists(SITES, max_size=3), st.dictionaries(TEXT, st.just((0, 1))), st.dictionaries(TEXT, st.integers(0, 9))
)
@settings(deadline=None)
def test_any_summary_becomes_a_well_formed_fragment(summaries, kept, dropped):
    set_language("en")
    page = Page(sites_html(summaries, kept, dropped))
    assert page.rows == len(summaries) + bool(summaries)


@given(st.text(st.characters(exclude_categories=[])))
def test_no_text_becomes_markup(value):
    page = Page(tag("span", text(value), title=value))
    assert page.open == [] and len(page.hints) == 1
    assert page.text == page.hints[0]


def test_no_style_reaches_beyond_the_fragment():
    styles = Page(trace_html(Trace(plain_run(), chain(3), plain_end()))).styles
    selectors = re.findall(r"([^{}]+)\{[^{}]*\}", styles)
    assert len(selectors) > 10
    for selector in ",".join(selectors).split(","):
        assert re.match(r"\s*\.dsc\b", selector), selector
    assert "url(" not in styles and "@" not in styles


@pytest.mark.parametrize(
    ("language", "left_out"), [("en", "1,500 tokens are not shown"), ("zh", "有 1,500 个 token 未显示")]
)
def test_a_long_run_stays_small_and_says_what_is_left_out(language, left_out):
    set_language(language)
    long = Trace(plain_run(), steps_of(3000), plain_end("x" * 10**6))
    fragment = trace_html(long)
    page = Page(fragment)
    assert left_out in page.text and "2,948" in page.text
    assert len(fragment) < 600_000 and page.rows < 70
    assert len(trace_html(Trace(plain_run(), steps_of(12_000), plain_end()))) < 1.1 * len(fragment)
    assert len(repr(long)) < 300


def test_the_step_shows_its_candidates_and_the_chosen_one_wherever_it_ranks():
    step = chain(1)[0]
    far = replace(step, token_id=step.candidates[30].token_id, text="far", rank=31)
    shown = Page(trace_html(Trace(plain_run(), [far], plain_end())))
    for word in ("tok1", "tok4", "tok31"):
        assert word in shown.texts
    assert "tok5" not in shown.texts
    assert "tok5" in Page(trace_html(Trace(plain_run(), [step], plain_end()))).texts


def test_a_run_without_steps_or_end_is_shown_as_far_as_it_is():
    page = Page(trace_html(Trace(plain_run())))
    assert "The run has no end yet." in page.texts and "p0" in page.texts


def test_a_value_that_is_no_number_is_marked():
    plain = SiteSummary(0, 3, "up", (1, 2, 8), "float32", 16, 0.5, 1.0, -2.0, 3.0, 4.0, 8.0, 0.1, 0.25, 0)
    broken = replace(
        plain, layer=None, site="logits", mean=float("nan"), max=float("inf"), nonfinite=2, recomputed=True
    )
    fragment = sites_html([plain, broken], {"layers.3.up": range(100)}, {"embed": 12345})
    page = Page(fragment)
    for words in (
        "layers.3.up",
        "1×2×8",
        "25.0 %",
        "logits *",
        "nan",
        "inf",
        "layers.3.up [0, 1, 2, 3, 4, 5, 6, 7, …, 99]",
        "embed: 12,345 bytes",
    ):
        assert words in page.texts
    assert fragment.count('class="dsc-bad"') == 1 and fragment.count("<svg") == 1


def test_notebooks_show_traces_and_recordings(tmp_path):
    session = Session.open(str(make_tiny_model(tmp_path / "tiny")))
    with session.observe(["layers.1.pattern", "embed"], summarise=["*"], budget_bytes=3000) as recording:
        trace = session.run("春天 <b>", max_new_tokens=4)
    shown = Page(trace._repr_html_())
    assert trace.run.model in shown.text and "<|im_start|>" in shown.texts
    page = Page(recording._repr_html_())
    assert f"{len(recording.summaries)} values summed up" in page.text
    assert "layers.0.attn_norm" in page.texts and "more are not shown" in page.text
    assert any(line.startswith("layers.1.pattern: ") for line in page.texts)  # dropped
    assert len(repr(trace)) < 300 and len(repr(recording)) < 300
    assert f"summaries={len(recording.summaries)}" in repr(recording)


def test_a_saved_trace_is_shown_without_torch():
    code = "import sys, decodescope.trace.html; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
