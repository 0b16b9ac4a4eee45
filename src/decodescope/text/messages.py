"""Conversations and prompts in files: JSON lists of `{"role": ..., "content": ...}`, and a prompt a line."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decodescope.errors import InputError
from decodescope.text.blueprint import one_line

Message = dict[str, str]

ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(path: Path) -> list[Message]:
    """Read and check a conversation; raises InputError that names what is wrong and in which message."""
    text = _read_text(path)
    try:
        messages = json.loads(text)
    except json.JSONDecodeError as fault:
        raise InputError("chat.messages_not_json", path=path, line=fault.lineno, reason=fault.msg) from None
    except (ValueError, RecursionError):  # a number of thousands of digits, thousands of brackets
        raise InputError("chat.messages_not_list", path=path) from None
    return _messages(path, messages)


def with_system(messages: Sequence[Message], system: str | None) -> list[Message]:
    """The conversation with a system message in front, in place of one that is there."""
    if system is None:
        return list(messages)
    rest = messages[1:] if messages and messages[0]["role"] == "system" else messages
    return [{"role": "system", "content": system}, *rest]


def read_prompts(path: Path, *, messages: bool = True) -> list[str | list[Message]]:
    """A prompt a line: plain text, or in a .jsonl file `prompt` or `messages` objects; empty lines do not count.

    Raises InputError that names what is wrong and in which line.
    """
    # Not splitlines(), which would also cut at U+2028 and the like inside a JSON string.
    numbered = enumerate(_read_text(path).split("\n"), start=1)
    lines = [(number, line.removesuffix("\r")) for number, line in numbered if line.strip()]
    if not lines:
        raise InputError("chat.no_prompts", path=path)
    if path.suffix != ".jsonl":
        return [line for _, line in lines]
    prompts = [_json_prompt(path, number, line) for number, line in lines]
    if not messages and not all(isinstance(prompt, str) for prompt in prompts):
        raise InputError("run.raw_messages")
    return prompts


def _json_prompt(path: Path, number: int, line: str) -> str | list[Message]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise InputError("chat.prompt_line", path=path, line=number) from None
    if isinstance(entry, dict) and list(entry) == ["messages"]:
        return _messages(path, entry["messages"])
    if isinstance(entry, dict) and list(entry) == ["prompt"] and isinstance(entry["prompt"], str):
        return str(entry["prompt"])
    raise InputError("chat.prompt_line", path=path, line=number)


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as fault:
        raise InputError("chat.messages_unreadable", path=path, reason=fault.strerror) from None
    except UnicodeDecodeError as fault:
        raise InputError("chat.messages_not_utf8", path=path, place=fault.start) from None


def _messages(path: Path, messages: Any) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise InputError("chat.messages_not_list", path=path)
    return [_message(path, number, message) for number, message in enumerate(messages, start=1)]


def _message(path: Path, number: int, message: Any) -> Message:
    if not isinstance(message, dict):
        raise InputError("chat.message_not_object", path=path, number=number)
    unknown = sorted(set(message) - {"role", "content"})
    if unknown:
        raise InputError("chat.message_unknown_key", path=path, number=number, names=one_line(", ".join(unknown)))
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise InputError("chat.message_role", path=path, number=number, roles=", ".join(ROLES))
    if not isinstance(content, str):
        raise InputError("chat.message_content", path=path, number=number)
    return {"role": role, "content": content}
