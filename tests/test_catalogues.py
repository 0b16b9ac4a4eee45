"""The sentences: the same in both languages, each used, each one used there, every placeholder filled."""

import ast
from collections.abc import Iterator
from string import Formatter
from typing import get_args

import pytest

from decodescope.locale import LANGUAGES, catalogue, set_language, translate
from decodescope.monitor.alerts import ALERTS, EXAMPLES
from decodescope.monitor.dashboard_panels import ROWS
from decodescope.sampling.params import Origin
from decodescope.trace.records import Action, FinishReason
from repository import modules

# What is called with the name of a sentence, and what it puts in front of that name.
CALLS = {
    "t": "",
    "translate": "",
    **dict.fromkeys(("DecodescopeError", "InputError", "ResourceError", "FindingError", "SourceFault"), "error."),
    "foreign_faults": "error.",
    "option": "help.",
    "prompt_argument": "help.",
    "_heading": "model.",
}
GIVEN_BY_CALLED = {"foreign_faults": {"reason"}}  # placeholders that the callee fills
PANELS = [panel for row in ROWS.values() for panel in row]
WORDS = {query.word for panel in PANELS for query in panel.queries} - {"", "p50", "p95", "p99"}
# Names that are put together from a value while running: all of them, in full.
PUT_TOGETHER = {
    *(f"origin.{name.replace(' ', '_')}" for name in get_args(Origin)),
    *(f"finish.{name}" for name in get_args(FinishReason)),
    *(f"guard.{room}.{name}" for room in ("action", "did") for name in get_args(Action)),
    *(
        f"chat.column.{name}"
        for name in ("turn", "prompt", "reused", "read", "prefill", "new", "speed", "cache", "finish")
    ),
    *(f"step.help.{name}" for name in ("next", "rank", "id", "text", "back", "run_on", "quit")),
    *(
        f"pull.source.{name}"
        for name in ("cache", "file", "folder", "hub", "mirror", "modelscope", "ollama", "random", "wheels")
    ),
    *(f"error.pull.{name}_nowhere" for name in ("hub", "modelscope")),
    *(f"error.checkpoint.{name}" for name in ("missing", "unexpected")),
    *(
        f"error.sampling.{name}"
        for name in (
            "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
            "frequency_penalty", "no_repeat_ngram_size",
        )
    ),
    *(f"tokens.{name}" for name in ("text", "normalised", "pieces", "partial", "injected")),
    *(f"alert.{alert.key}.{part}" for alert in (*ALERTS, *EXAMPLES) for part in ("summary", "description")),
    *(f"panel.{panel.key}.{part}" for panel in PANELS for part in ("title", "description")),
    *(f"panel.word.{word}" for word in WORDS),
    *(f"dashboard.row.{row}" for row in ROWS),
    *(f"dashboard.variable.{name}" for name in ("datasource", "job", "instance", "model_name")),
    *(f"tokens.column.{name}" for name in ("index", "token", "id", "bytes", "role", "remark")),
}  # fmt: skip


def placeholders(sentence: str) -> set[str]:
    return {field for _, field, _, _ in Formatter().parse(sentence) if field is not None}


def constants(node: ast.expr | None) -> Iterator[str]:
    """The strings a first argument may be: itself, or both ends of an `a if b else c`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from constants(node.body)
        yield from constants(node.orelse)


def called(node: ast.Call) -> str:
    """The last name of what is called: `t` of `t(...)`, `option` of `o.option(...)`."""
    return getattr(node.func, "id", getattr(node.func, "attr", ""))


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """(place, key, call) of every call that names a sentence outright."""
    for path, tree in modules("src/decodescope").items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and called(node) in CALLS:
                for name in constants(node.args[0] if node.args else None):
                    yield f"{path}:{node.lineno}", CALLS[called(node)] + name, node


def dotted_strings() -> set[str]:
    """Strings with a dot anywhere in the package: a sentence's name may wait in a variable."""
    nodes = (node for tree in modules("src/decodescope").values() for node in ast.walk(tree))
    return {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str) and "." in n.value}


def test_both_languages_hold_the_same_sentences_with_the_same_placeholders():
    english, chinese = (catalogue(code) for code in LANGUAGES)
    assert english.keys() == chinese.keys()
    differing = [key for key in english if placeholders(english[key]) != placeholders(chinese[key])]
    assert not differing


def test_every_sentence_that_is_named_exists():
    missing = {f"{place} {key}" for place, key, _ in calls() if key not in catalogue("en")}
    assert not missing
    assert catalogue("en").keys() >= PUT_TOGETHER
    notes = {string for string in dotted_strings() if string.startswith("note.")}
    assert notes and notes <= catalogue("en").keys()


def test_every_sentence_that_exists_is_used():
    waiting = {prefix + string for string in dotted_strings() for prefix in ("", "error.")}
    used = {key for _, key, _ in calls()} | PUT_TOGETHER | waiting
    assert sorted(catalogue("en").keys() - used) == []


def test_every_placeholder_is_filled_wherever_the_sentence_is_named():
    lacking = []
    for place, key, call in calls():
        given = {keyword.arg for keyword in call.keywords}
        if key in catalogue("en") and None not in given:  # None: **values
            given |= GIVEN_BY_CALLED.get(called(call), set())
            lacking += [f"{place} {key} lacks {name}" for name in placeholders(catalogue("en")[key]) - given]
    assert not lacking


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_sentence_can_be_filled(language):
    set_language(language)
    for key, sentence in catalogue(language).items():
        if "{" in sentence:
            assert translate(key, **dict.fromkeys(placeholders(sentence), 1))


def test_an_error_is_one_line_without_the_programs_name():
    for code in LANGUAGES:
        for key, sentence in catalogue(code).items():
            assert "\n" not in sentence, key
            assert not (key.startswith("error.") and "decodescope: " in sentence), key
