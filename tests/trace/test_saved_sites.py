"""Laws of the table `site`: what was seen of inner values comes back, for the branch that was kept."""

import math
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_records import (
    COUNT,
    FLAG,
    MEASURED,
    TEXT,
    as_format,
    chain,
    edit,
    maybe,
    plain_end,
    plain_run,
    plain_step,
    query,
    tuples,
)

from decodescope.errors import InputError
from decodescope.trace.ends import end_of
from decodescope.trace.records import path_to
from decodescope.trace.saved import read_sites, read_trace, saved_tensors
from decodescope.trace.site_records import SiteSummary
from decodescope.trace.store import TraceWriter

SUMMARIES = st.builds(
    SiteSummary,
    step=COUNT, layer=maybe(COUNT), site=TEXT, shape=tuples(COUNT, 4), dtype=TEXT, count=COUNT, mean=MEASURED,
    std=MEASURED, min=MEASURED, max=MEASURED, l2=MEASURED, sum=MEASURED, signature=MEASURED, zeros=MEASURED,
    nonfinite=COUNT, recomputed=FLAG,
)  # fmt: skip


def plain_summary(step: int, mark: float = 0.0) -> SiteSummary:
    return SiteSummary(step, 3, "up", (1, 5, 48), "float32", 240, mark, 1.0, -2.0, 2.0, 9.0, 1.0, 0.5, 0.0, 0)


def lines(summaries: list[SiteSummary]) -> list[str]:
    """As text, in which NaN equals itself; the sign of a zero is not kept."""
    return [repr(each).replace("=-0.0,", "=0.0,") for each in summaries]


@given(st.lists(st.lists(SUMMARIES, max_size=3), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_summaries_come_back_equal_in_their_order(passes):
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        with TraceWriter.create(folder, plain_run()) as writer:
            for step, summaries in zip(chain(len(passes)), passes, strict=True):
                writer.write_sites(summaries, step.node)
                writer.write(step)
            writer.finish(plain_end())
        assert lines(read_sites(folder)) == lines([each for summaries in passes for each in summaries])


def saved(folder: Path, parents: dict[int, int | None], sites: list[int], kept: int | None) -> Path:
    """A run whose nodes hang on `parents`; those of `sites` have a summary that bears their number."""
    steps = {node: plain_step(node, parent) for node, parent in parents.items()}
    with TraceWriter.create(folder, plain_run()) as writer:
        for node, step in steps.items():
            if node in sites:
                writer.write_sites([plain_summary(step.step, node)], node)
            writer.write(step)
        for node in sites:
            if node not in steps:
                writer.write_sites([plain_summary(node, node)], node)
        writer.finish(end_of(plain_run(), path_to(list(steps.values()), kept), "length"))
    return folder


@pytest.mark.parametrize(
    ("parents", "sites", "kept", "found"),
    [
        ({0: None, 1: 0, 2: 1}, [0, 1, 2], 2, [0, 1, 2]),
        ({0: None, 1: 0, 2: 0, 3: 2}, [0, 1, 3], 3, [0, 1, 3]),  # 1 was replaced by 2: the same pass
        ({0: None, 1: 0, 2: 1, 3: 0, 4: 3}, [0, 1, 2, 4], 4, [0, 1, 4]),  # gone back to 1, replaced by 3
        ({0: None, 1: 0, 2: 0}, [0, 1, 2], 2, [0, 2]),  # gone back to 0 and on again: the later of equal passes
        ({0: None, 1: None}, [0], 1, [0]),  # the first token was replaced
        ({0: None, 1: 0, 2: 1}, [0, 1, 2], 1, [0, 1]),  # ended after going back
        ({0: None, 1: 0}, [1], 1, [1]),  # only some steps were looked at
        ({0: None, 1: 0}, [0, 1, 2], 1, [0, 1, 2]),  # nothing could be chosen from the last pass
        ({}, [0], None, [0]),
    ],
)
def test_sites_are_those_of_the_passes_behind_the_branch_that_was_kept(tmp_path, parents, sites, kept, found):
    folder = saved(tmp_path / "run", parents, sites, kept)
    assert [each.mean for each in read_sites(folder)] == found


def test_a_summary_is_there_before_its_step_is_shown_and_nothing_is_written_for_none(tmp_path):
    with TraceWriter.create(tmp_path / "run", plain_run()) as writer:
        writer.write_sites([], 0)
        writer.write_sites([plain_summary(0)], 0)
        assert read_sites(tmp_path / "run") == [plain_summary(0)]
        writer.write(plain_step(0, None))
        assert read_sites(tmp_path / "run") == [plain_summary(0)]


def test_numbers_that_are_none_are_kept(tmp_path):
    broken = replace(plain_summary(0), mean=math.nan, max=math.inf, min=-math.inf, nonfinite=3)
    with TraceWriter.create(tmp_path / "run", plain_run()) as writer:
        writer.write_sites([broken], 0)
        writer.write(plain_step(0, None))
    (found,) = read_sites(tmp_path / "run")
    assert math.isnan(found.mean) and (found.max, found.min, found.nonfinite) == (math.inf, -math.inf, 3)


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("UPDATE site SET shape = '[1, 2.5]'", "damaged .site.shape"),
        ("UPDATE site SET shape = '5'", "damaged .site.shape"),
        ("UPDATE site SET elements = 'many'", "damaged .site.elements: str"),
        ("UPDATE site SET l2 = x'00'", "damaged .site.l2: bytes"),
        ("DROP TABLE site", "damaged .sqlite_schema."),
        ("PRAGMA user_version = 5", "saved by a newer decodescope .format 5, this one reads up to 4."),
    ],
)
def test_a_database_that_lies_about_sites_is_refused_in_one_sentence(tmp_path, script, sentence):
    folder = saved(tmp_path / "run", {0: None}, [0], 0)
    with pytest.raises(InputError, match=sentence):
        read_sites(edit(folder, script))


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_folder_of_an_older_format_still_reads(tmp_path, version):
    folder = saved(tmp_path / "run", {0: None, 1: 0, 2: 0}, [0, 1], 2)
    old = as_format(version, folder, tmp_path / "old")
    assert query(old, "PRAGMA user_version") == [(version,)]
    assert query(old, "SELECT count(*) FROM sqlite_schema WHERE name = 'site'") == [(version > 1,)]
    assert query(old, "SELECT count(*) FROM sqlite_schema WHERE name = 'branch'") == [(version > 2,)]
    trace, known = read_trace(old), read_trace(folder)
    assert (trace.run, trace.steps, trace.branches) == (known.run, known.steps, [])
    assert trace.end == replace(known.end, trace=str(old))
    assert read_sites(old) == (read_sites(folder) if version > 1 else []) and saved_tensors(old) == []


@pytest.mark.parametrize("claimed", [2, 3, 4])
def test_a_format_1_folder_that_claims_a_later_one_is_refused(tmp_path, claimed):
    old = as_format(1, saved(tmp_path / "run", {0: None}, [], 0), tmp_path / "old")
    with pytest.raises(InputError, match="damaged"):
        read_trace(edit(old, f"PRAGMA user_version = {claimed}"))
