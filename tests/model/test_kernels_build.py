"""Compiling on first use: once, safely side by side, and never from files that others can change."""

import os
import shutil
import stat
import threading
from pathlib import Path

import pytest

from decodescope.model.kernels import build as builder
from decodescope.model.kernels.build import FLAGS, Built, build

QUICK = ("-O0", *FLAGS[2:])

HERE = any(shutil.which(name) for name in builder.COMPILERS)
pytestmark = [
    pytest.mark.skipif(not HERE, reason="needs a C compiler; ends where there is one"),
]


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DECODESCOPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that copies a file and counts its calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "cc").write_text(
        f"#!/bin/sh\necho call >> {tmp_path}/calls\n"
        'while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done\necho library > "$out"\n'
    )
    (folder / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder / "cc"


def calls(compiler: Path) -> int:
    return len((compiler.parent.parent / "calls").read_text().split())


def test_a_second_start_finds_what_the_first_one_built(room, compiler):
    first = build()
    assert first.path and first.path.parent == room and first == build()
    assert calls(compiler) == 1
    assert [file.name for file in room.iterdir()] == [first.path.name]


def test_only_we_may_enter_the_folder_and_change_the_library(room, compiler):
    path = build().path
    assert path
    assert stat.S_IMODE(room.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_other_flags_another_compiler_or_another_processor_make_another_library(room, compiler, monkeypatch):
    paths = [build().path, build((*FLAGS, "-g")).path]
    compiler.write_text(compiler.read_text() + "# a newer one\n")
    paths.append(build().path)
    monkeypatch.setattr(builder, "_processor", lambda: "a processor with one flag more")
    paths.append(build().path)
    assert None not in paths and len(set(paths)) == 4


def test_a_change_in_any_source_makes_another_library(room, compiler, monkeypatch, tmp_path):
    before = build().path
    for number, header in enumerate(builder.HEADERS):
        changed = tmp_path / header.name
        changed.write_bytes(header.read_bytes() + b"\n")
        headers = (*builder.HEADERS[:number], changed, *builder.HEADERS[number + 1 :])
        with monkeypatch.context() as patch:
            patch.setattr(builder, "HEADERS", headers)
            assert build().path != before


def test_every_file_that_is_compiled_is_in_the_key():
    folder = builder.SOURCE.parent
    assert {builder.SOURCE, *builder.HEADERS} == {*folder.glob("*.c"), *folder.glob("*.h")}


def test_first_uses_side_by_side_all_get_a_whole_library(room):
    found: list[Built] = []
    threads = [threading.Thread(target=lambda: found.append(build(QUICK))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and len(set(found)) == 1
    assert found[0].path and found[0].path.read_bytes()[:4] in (b"\x7fELF", b"\xcf\xfa\xed\xfe")
    assert [file.name for file in room.iterdir()] == [found[0].path.name]


def test_a_failed_compilation_says_why_and_is_not_tried_again(room, compiler):
    script = compiler.read_text()
    compiler.write_text(script + "echo no such option >&2\nexit 1\n")
    first = build()
    assert first.path is None and first.reason == "compile_failed" and "no such option" in first.detail
    assert build() == first and calls(compiler) == 1
    compiler.write_text(script)  # a compiler that works is another compiler
    assert build().path


def test_a_compiler_that_writes_nothing_has_failed(room, compiler):
    compiler.write_text("#!/bin/sh\nexit 0\n")
    assert build().reason == "compile_failed"


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_is_not_used(room, compiler, mode):
    room.mkdir(parents=True)
    room.chmod(mode)
    assert build().reason == "cache_unsafe"


def test_a_folder_that_is_a_link_is_not_used(room, compiler, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    room.parent.mkdir(parents=True)
    room.symlink_to(tmp_path / "elsewhere")
    assert build().reason == "cache_unsafe"


def test_a_folder_that_others_may_swap_is_not_used(room, compiler):
    room.parent.mkdir(parents=True)
    room.parent.chmod(0o777)
    assert build().reason == "cache_unsafe"


def test_a_library_that_others_may_write_or_that_is_a_link_is_not_loaded(room, compiler):
    path = build().path
    assert path
    path.chmod(0o722)
    assert build().reason == "cache_unsafe"
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")
    assert build().reason == "cache_unsafe"


def test_a_library_of_another_owner_is_not_loaded(room, compiler, monkeypatch):
    assert build().path
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    assert build().reason == "cache_unsafe"


def test_a_cache_that_cannot_be_written_means_no_kernels(room, compiler):
    room.parent.write_text("a file where the cache should be")
    assert build().reason == "cache_unwritable"


def test_without_a_compiler_there_are_no_kernels(room, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert build() == Built(reason="no_compiler")
