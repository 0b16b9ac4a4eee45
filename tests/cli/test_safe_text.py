"""Nothing from a model or a file commands the terminal, whatever shows it."""

from dataclasses import replace

import pytest

from decodescope import read_trace
from decodescope.cli.console import line
from decodescope.trace.store import TraceWriter
from decodescope.visible import token_text, visible

EVIL = "a\x1b]0;owned\x07b\x9b2J\u202ec"


def test_control_characters_become_pictures():
    assert visible(EVIL) == "a␛]0;owned␇b⟨U+009B⟩2J⟨U+202E⟩c"
    assert line(EVIL, (EVIL, "bold")).plain == visible(EVIL) * 2


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" a ", "␣a␣"),
        ("  ", "␣␣"),
        ("", "∅"),
        ("\n\t", "↵⇥"),
        ("👨\u200d👩", "👨\u200d👩"),
        ("\ud800", "⟨U+D800⟩"),
    ],
)
def test_tokens_are_shown_with_their_edges(text, shown):
    assert token_text(text) == shown


def test_a_foreign_run_is_drawn_without_obeying_it(cli, tiny, tmp_path):
    cli("run", "Hi", "-m", tiny, "-n", "1", "--save", tmp_path / "run")
    trace = read_trace(tmp_path / "run")
    run = replace(trace.run, model=EVIL, source=EVIL, revision=EVIL, dtype=EVIL, notes=(EVIL, "note.of_tomorrow"))
    with TraceWriter.create(tmp_path / "foreign", run) as writer:
        writer.write(trace.steps[0])
        writer.finish(replace(trace.end, error=EVIL))
    shown = cli("show", tmp_path / "foreign")
    assert shown.code == 0
    assert "\x1b" not in shown.out and "\x9b" not in shown.out and "\u202e" not in shown.out
    assert "note.of_tomorrow" in shown.out


def test_a_fault_does_not_command_the_terminal_either(cli, tmp_path):
    outcome = cli("show", tmp_path / EVIL)
    assert outcome.code == 2
    assert "\x1b" not in outcome.err and "␛" in outcome.fault
