"""`run --chat-loop`: a conversation line by line, what each turn cost, and why long ones slow down."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from decodescope.cli.console import StderrReport, asked, line, out
from decodescope.cli.run_view import draw_model, draw_settings, finish_text
from decodescope.cli.step_view import draw_interventions
from decodescope.cli.tables import draw_heading, plain_table
from decodescope.cli.units import binary_bytes, count, milliseconds, number
from decodescope.errors import InputError
from decodescope.locale import translate as t
from decodescope.locale import translate_or
from decodescope.trace.lines import document_text
from decodescope.visible import token_text, visible

if TYPE_CHECKING:
    from decodescope.experiments.conversation import Conversation, Slowdown, Turn
    from decodescope.live import LiveRun
    from decodescope.options import RunOptions
    from decodescope.session import Session

_COLUMNS = ("turn", "prompt", "reused", "read", "prefill", "new", "speed", "cache", "finish")
_UNKNOWN = "-"


def talk(session: "Session", options: "RunOptions", *, prompt: str | None, system: str | None, json: bool) -> None:
    """Keep a conversation going; `prompt` is its first turn. Raises InputError where the context is full."""
    from decodescope.experiments.conversation import Conversation

    conversation = Conversation(session, options, system)
    if not json:
        out().print(line((t("chat.begin"), "dim")))
    try:
        for text in _lines(prompt, json):
            if text.strip() == "/quit":
                break
            if text.strip() == "/undo":
                _undo(conversation, json)
            elif text.strip():
                _take_turn(conversation, text, json)
    finally:
        if not json and conversation.turns:
            _draw_table(conversation)


def _lines(first: str | None, json: bool) -> Iterator[str]:
    """What the reader says, line by line. Raises InputError for what is no UTF-8."""
    mark = "" if json else f"{t('chat.prompt')} "
    text = first if first is not None else asked(mark)
    while text is not None:
        if not json and (text is first or not sys.stdin.isatty()):  # where the terminal has not shown it
            out().print(line((mark if text is first else "", "bold"), text))
        try:
            text.encode()
        except UnicodeError:
            raise InputError("prompt.not_utf8") from None
        yield text
        text = asked(mark)


def _undo(conversation: "Conversation", json: bool) -> None:
    turn = conversation.undo()
    if not json:
        out().print(t("chat.nothing_to_undo") if turn is None else t("chat.undone", turn=turn.turn))


def _take_turn(conversation: "Conversation", text: str, json: bool) -> None:
    with StderrReport() as report:
        try:
            live = conversation.ask(text, report.reading)
        except InputError as fault:
            if json or not conversation.turns:
                raise
            out().print(line((str(fault), "yellow")))  # too long: another line, or /undo, may still fit
            return
        if not json and not conversation.begun:
            draw_model(live.traces[0].run)
            draw_settings(live.traces[0].run)
        try:
            if json:
                for _ in live.steps():
                    pass
            else:
                _stream(live)
        finally:
            live.finish("interrupted")  # says nothing where the run has ended
    turn = conversation.answered(live)
    if json:
        print(document_text(turn), flush=True)
    else:
        _draw_turn(turn, live)


def _stream(live: "LiveRun") -> None:
    """The answer as it comes, what guards did about it, and what was held back to the end."""
    told = ""
    for _, step in live.steps():
        told += step.delta_text
        _say(step.delta_text)
        if step.interventions:
            out().print()
            draw_interventions(step)
    (trace,) = live.traces
    _say(trace.text.removeprefix(told))
    out().print()


def _say(text: str) -> None:
    out().print(Text(visible(text, keep_newlines=True), "green"), end="")


def _draw_turn(turn: "Turn", live: "LiveRun") -> None:
    """What a turn cost."""
    (trace,) = live.traces
    ended = finish_text(trace.end) if trace.end else _UNKNOWN
    read = {"prompt": turn.prompt_tokens, "reused": turn.reused_tokens, "read": turn.read_tokens}
    _remark(t("chat.turn", turn=turn.turn, finish=ended))
    _remark(t("chat.tokens", **read, seconds=milliseconds(turn.prefill_s)))
    if turn.decode_tokens_per_s is None:
        _remark(t("chat.answer", new=turn.new_tokens))
    else:
        _remark(t("chat.speed", new=turn.new_tokens, speed=number(turn.decode_tokens_per_s, 1)))
    _remark(_cache(turn) if trace.run.use_cache else t("chat.no_cache"))
    if turn.parting is not None:
        held, wanted = token_text(turn.parting.held_text), token_text(turn.parting.wanted_text)
        where = {"position": turn.parting.position, "lost": turn.parting.lost_tokens}
        _remark(t("chat.parts", held=held, wanted=wanted, **where), "yellow")


def _cache(turn: "Turn") -> str:
    size, growth = binary_bytes(turn.cache_bytes), turn.cache_growth_bytes
    if growth == turn.cache_bytes:
        return t("chat.cache_first", bytes=size)
    return t("chat.cache" if growth >= 0 else "chat.cache_less", bytes=size, growth=binary_bytes(abs(growth)))


def _remark(text: str, style: str = "dim") -> None:
    out().print(line("    ", (text, style)))


def _draw_table(conversation: "Conversation") -> None:
    """The turns that stand, and one sentence about them."""
    draw_heading(t("chat.table", count=len(conversation.turns)))
    table = plain_table(f"chat.column.{name}" for name in _COLUMNS)
    for turn in conversation.turns:
        cells = (
            str(turn.turn),
            count(turn.prompt_tokens),
            count(turn.reused_tokens),
            count(turn.read_tokens),
            milliseconds(turn.prefill_s),
            count(turn.new_tokens),
            _UNKNOWN if turn.decode_tokens_per_s is None else number(turn.decode_tokens_per_s, 1),
            binary_bytes(turn.cache_bytes),
            translate_or(f"finish.{turn.finish_reason}", turn.finish_reason),
        )
        table.add_row(*map(Text, cells))
    out().print(table)
    slowdown = conversation.slowdown
    if slowdown is not None:
        out().print(Text(_why(slowdown)), soft_wrap=False)


def _why(slowdown: "Slowdown") -> str:
    """Why long conversations slow down, in what was measured here."""
    first, last = slowdown.first, slowdown.last
    return t(
        "chat.why" if last.cache_bytes else "chat.why_no_cache",
        first=first.turn,
        last=last.turn,
        prompt_first=count(first.prompt_tokens),
        prompt_last=count(last.prompt_tokens),
        cache_first=binary_bytes(first.cache_bytes),
        cache_last=binary_bytes(last.cache_bytes),
        token_first=_time(first.seconds_per_token),
        token_last=_time(last.seconds_per_token),
        prompt=count(slowdown.prompt_tokens),
        reused=count(slowdown.reused_tokens),
    )


def _time(seconds: float | None) -> str:
    return _UNKNOWN if seconds is None else milliseconds(seconds)
