"""Models made of random numbers, layers on disk and memory limits, as a session opens them."""

import json
from pathlib import Path

import pytest

from decodescope.errors import InputError
from decodescope.locale import translate
from decodescope.session import Session
from tiny_model import make_tiny_model

KEYS = dict(
    architectures=["Qwen2ForCausalLM"], vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("loading") / "tiny"))


@pytest.fixture
def config(tmp_path) -> Path:
    file = tmp_path / "shape.json"
    file.write_text(json.dumps(KEYS))
    return file


def test_a_random_model_runs_and_says_what_it_is(tiny, config):
    session = Session.open(tiny, random_weights=config)
    trace = session.run("hello", max_new_tokens=4, ignore_eos=True)
    run = trace.run
    assert (run.model, run.source, run.path) == (str(config), "random", str(config))
    assert (run.sha256, run.revision, run.dtype, run.vocabulary) == (None, None, "bfloat16", 260)
    assert "note.random_weights" in run.notes
    assert session.files.bytes == sum(session.weights.stored_bytes().values())
    again = Session.open(tiny, random_weights=str(config)).run("hello", max_new_tokens=4, ignore_eos=True)
    assert [step.token_id for step in again.path()] == [step.token_id for step in trace.path()]


def test_the_tokenizer_and_the_template_are_those_of_the_model(tiny, config):
    usual, random = Session.open(tiny), Session.open(tiny, random_weights=config)
    assert random.prompt("hello").ids == usual.prompt("hello").ids


def test_a_vocabulary_that_the_random_model_has_no_rows_for_is_refused(tiny, config):
    config.write_text(json.dumps({**KEYS, "vocab_size": 258}))
    with pytest.raises(InputError, match=r"259 ids.*258 rows"):
        Session.open(tiny, random_weights=config)


@pytest.mark.parametrize("count", [1, "2", "all"])
def test_layers_on_disk_change_no_logit_and_are_told(tiny, config, count, monkeypatch, tmp_path):
    told: list[str] = []
    here = Session.open(tiny, random_weights=config)
    monkeypatch.setenv("DECODESCOPE_CACHE", str(tmp_path / "cache"))
    there = Session.open(
        tiny, random_weights=config, layers_on_disk=count, report=lambda text, *_: told.append(text)
    )
    runs = [session.run("hello", max_new_tokens=3, ignore_eos=True) for session in (here, there)]
    logits = [[c.logit for step in trace.path() for c in step.candidates] for trace in runs]
    assert logits[0] == logits[1]
    number = 4 if count == "all" else int(count)
    assert f"{number} of 4 layers on disk" in told[-1] and "tokens/s (estimated)" in told[-1]
    assert f"note.layers_on_disk:{number}" in runs[1].run.notes
    assert "note.layers_on_disk" not in " ".join(runs[0].run.notes)


@pytest.mark.parametrize(
    ("how", "key"),
    [
        ({"layers_on_disk": "some"}, "disk.layers"),
        ({"layers_on_disk": -1}, "disk.layers"),
        ({"layers_on_disk": "9" * 5000}, "disk.layers"),
        ({"layers_on_disk": 3}, "disk.most"),
        ({"layers_on_disk": 1, "max_memory_bytes": 1 << 33}, "memory.limit_chooses"),
        ({"max_memory_bytes": 1 << 20}, "memory.limit"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(tiny, how, key):
    with pytest.raises(InputError) as fault:
        Session.open(tiny, **how)
    assert fault.value.key == key
    assert str(fault.value)


def test_a_limit_says_what_it_led_to(tiny):
    told: list[str] = []
    session = Session.open(tiny, max_memory_bytes=1 << 35, report=lambda text, *_: told.append(text))
    (plan,) = [text for text in told if text.startswith("--max-memory")]
    assert "32.00 GiB: weights as stored" in plan and "cache of 512 tokens" in plan and "(estimated)" in plan
    assert session.dtype == "float32"


def test_a_dtype_asked_for_is_kept_under_a_limit(tiny):
    session = Session.open(tiny, dtype="bfloat16", max_memory_bytes=1 << 35)
    assert session.dtype == "bfloat16"


def test_the_notes_are_sentences_in_both_languages():
    for key in ("note.random_weights", "note.layers_on_disk"):
        assert translate(key, detail="3")
