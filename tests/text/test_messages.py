"""Files of messages and of prompts are read or refused in one sentence."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decodescope.errors import InputError
from decodescope.text.messages import read_messages, read_prompts, with_system

GOOD = [{"role": "system", "content": "简短"}, {"role": "user", "content": ""}]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_good_file_is_read_as_it_stands(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "messages.json"
    path.write_text(json.dumps(GOOD, ensure_ascii=False), encoding=encoding)
    assert read_messages(path) == GOOD


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not JSON at line 1"),
        (b'[\n{"role": "user",}]', "not JSON at line 2"),
        ("你好".encode("gbk"), "not UTF-8 at byte 0"),
        (b"{}", "JSON list"),
        (b"[]", "JSON list"),
        (b"[" * 100_000, "JSON list"),
        (b"[" + b"1" * 5000 + b"]", "JSON list"),
        (b'["hello"]', "Message 1 .* not an object"),
        (b'[{"role": "user", "content": "a"}, {"content": "b"}]', "Message 2 .* role"),
        (b'[{"role": "boss", "content": "a"}]', "Message 1 .* system, developer, user, assistant, tool"),
        (b'[{"role": ["user"], "content": "a"}]', "Message 1 .* role"),
        (b'[{"role": "user"}]', "Message 1 .* content"),
        (b'[{"role": "user", "content": null}]', "Message 1 .* content"),
        (b'[{"role": "user", "content": [{"text": "a"}]}]', "Message 1 .* content"),
        (b'[{"role": "user", "content": "a", "name": "x", "age": 1}]', r"Message 1 .* \(age, name\)"),
    ],
)
def test_a_bad_file_is_refused_in_one_sentence(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "messages.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=says) as fault:
        read_messages(path)
    assert "messages.json" in str(fault.value) and "\n" not in str(fault.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            read_messages(path)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.floats(), st.text()),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(), JSON.map(lambda value: json.dumps(value).encode())))
def test_no_file_whatever_raises_anything_but_a_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "messages.json"
    path.write_bytes(content)
    try:
        assert all(set(message) == {"role", "content"} for message in read_messages(path))
    except InputError as fault:
        assert str(fault)


def test_a_system_message_goes_in_front_or_takes_the_place_of_the_one_there() -> None:
    user = {"role": "user", "content": "hi"}
    new = {"role": "system", "content": "new"}
    assert with_system([user], None) == [user]
    assert with_system([user], "new") == with_system([GOOD[0], user], "new") == [new, user]
    assert with_system([], "new") == [new]


def test_prompts_are_read_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("one\r\n\n 二 \u2028 two\n".encode())
    assert read_prompts(tmp_path / "a.txt") == ["one", " 二 \u2028 two"]
    lines = [{"prompt": "one\u2028two"}, {"messages": GOOD}]
    text = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8")
    assert read_prompts(tmp_path / "a.jsonl") == ["one\u2028two", GOOD]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", b" \n\n", "a.txt"),
        ("a.txt", b"\xff\xfe", "not UTF-8"),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": 3}', r"\b2\b"),
        ("a.jsonl", b'\n{"prompt": "a", "messages": []}', r"\b2\b"),
        ("a.jsonl", b"hello", r"\b1\b"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}', "Message 1"),
    ],
)
def test_a_bad_prompts_file_is_refused_in_one_sentence(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=says):
        read_prompts(tmp_path / name)
