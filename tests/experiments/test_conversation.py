"""Conversations: a turn is a run of its own on the messages so far, but for what it does not read again."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from decodescope import Session, read_trace
from decodescope.errors import InputError
from decodescope.experiments.conversation import Conversation, Turn
from decodescope.options import RunOptions
from tiny_model import TEMPLATE, make_tiny_model

SAID = ("Hi", "and you?", "春天", "x" * 40)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return Session.open(str(make_tiny_model(tmp_path_factory.mktemp("talk") / "tiny")))


def options(**more: object) -> RunOptions:
    return RunOptions(max_new_tokens=6, ignore_eos=True, candidates=3, **more)


def talked(conversation: Conversation, said: Sequence[str]) -> list[Turn]:
    turns = []
    for text in said:
        live = conversation.ask(text)
        for _ in live.steps():
            pass
        turns.append(conversation.answered(live))
    return turns


def messages(turns: Sequence[Turn], text: str) -> list[dict[str, str]]:
    pairs = [[{"role": "user", "content": t.user}, {"role": "assistant", "content": t.text}] for t in turns]
    return [*(message for pair in pairs for message in pair), {"role": "user", "content": text}]


def test_every_answer_is_that_of_a_fresh_run_on_the_same_messages(session):
    turns = talked(Conversation(session, options()), SAID)
    for place, turn in enumerate(turns):
        alone = session.run(session.chat(messages(turns[:place], turn.user)), options=options())
        assert turn.text == alone.text
        assert turn.prompt_tokens == len(alone.run.prompt_tokens)


def test_what_is_reused_and_what_is_read_is_the_prompt(session):
    turns = talked(Conversation(session, options()), SAID)
    assert all(turn.reused_tokens + turn.read_tokens == turn.prompt_tokens for turn in turns)
    assert turns[0].reused_tokens == 0
    # At least the former prompt is there again, word for word.
    for before, turn in pairwise(turns):
        assert turn.reused_tokens >= before.prompt_tokens


def test_the_cache_grows_by_what_a_turn_adds(session):
    turns = talked(Conversation(session, options()), SAID)
    per_token = session.run("x", max_new_tokens=1).run.kv_bytes_per_token
    for turn in turns:
        assert turn.cache_bytes == (turn.prompt_tokens + turn.new_tokens - 1) * per_token
    assert sum(turn.cache_growth_bytes for turn in turns) == turns[-1].cache_bytes


def test_an_answer_that_is_written_as_it_was_generated_stays_cached(session):
    """Of an answer of one token nothing has been fed, so all that is held is the prompt, which comes again."""
    turns = talked(Conversation(session, RunOptions(max_new_tokens=1, ignore_eos=True)), SAID)
    for before, turn in pairwise(turns):
        assert turn.parting is None
        assert turn.reused_tokens == before.prompt_tokens


def rewriting(folder: Path) -> Session:
    """A template whose first line counts the messages: no two turns begin alike."""
    path = make_tiny_model(folder) / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "chat_template": "{{ messages | length }} said:" + TEMPLATE}))
    return Session.open(str(folder))


def test_a_template_that_rewrites_the_history_is_found_out(tmp_path):
    turns = talked(Conversation(rewriting(tmp_path / "model"), options()), SAID[:2])
    second = turns[1]
    assert second.reused_tokens == 0 and second.read_tokens == second.prompt_tokens
    assert (second.parting.position, second.parting.held_text, second.parting.wanted_text) == (0, "1", "3")
    assert second.parting.lost_tokens == turns[0].prompt_tokens + turns[0].new_tokens - 1


def test_a_turn_taken_back_has_never_been(session):
    conversation = Conversation(session, options())
    first, _ = talked(conversation, SAID[:2])
    assert conversation.undo().user == SAID[1]
    (again,) = talked(conversation, [SAID[2]])
    straight = talked(Conversation(session, options()), [SAID[0], SAID[2]])
    assert again.text == straight[1].text
    assert again.parting is None and again.reused_tokens >= first.prompt_tokens
    assert [turn.turn for turn in conversation.turns] == [0, 2]
    assert conversation.undo() and conversation.undo() and conversation.undo() is None


def test_the_system_message_stands_in_front_of_every_turn(session):
    conversation = Conversation(session, options(), "be brief")
    for text in SAID[:2]:
        live = conversation.ask(text)
        assert live.traces[0].run.prompt_text.startswith("<|im_start|>system\nbe brief<|im_end|>")
        live.finish("interrupted")


def test_every_turn_has_a_run_folder_of_its_own(session, tmp_path):
    turns = talked(Conversation(session, options(save=tmp_path / "talk")), SAID[:3])
    assert sorted(each.name for each in (tmp_path / "talk").iterdir()) == ["0000", "0001", "0002"]
    for turn in turns:
        assert read_trace(Path(turn.trace)).text == turn.text


def test_first_and_last_turn_stand_side_by_side(session):
    conversation = Conversation(session, options())
    assert conversation.slowdown is None
    turns = talked(conversation, SAID[:3])
    found = conversation.slowdown
    assert (found.first, found.last) == (turns[0], turns[2])
    assert found.prompt_tokens == sum(turn.prompt_tokens for turn in turns)
    assert found.reused_tokens == turns[1].reused_tokens + turns[2].reused_tokens


def test_a_full_context_is_said_before_the_turn(session):
    with pytest.raises(InputError, match="512"):
        Conversation(session, options()).ask("x" * 600)


def test_with_drawing_and_without_a_cache_the_same_words_come(session):
    drawing = {"temperature": 1.0, "seed": 9}
    with_cache = talked(Conversation(session, options(sampling=drawing)), SAID[:3])
    without = talked(Conversation(session, options(sampling=drawing, use_cache=False)), SAID[:3])
    assert [turn.text for turn in with_cache] == [turn.text for turn in without]
    assert all(turn.reused_tokens == 0 and turn.cache_bytes == 0 for turn in without)
