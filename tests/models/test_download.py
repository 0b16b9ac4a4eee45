"""What may happen to one file on its way here."""

import errno
import shutil
import threading
from collections import namedtuple
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loopback import Server, git_blob, sha256

from decodescope.errors import InputError
from decodescope.models.download import Partial, download, part_of
from decodescope.models.network import Patience
from decodescope.models.records import RemoteFile, SourceFault, silent

CONTENT = bytes(range(256)) * 400
QUICK = Patience(read_s=0.5, attempts=3, pause_s=0.01)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "files" / "weights.bin"


def offered(server: Server, **changes: object) -> RemoteFile:
    server.files["/w"] = CONTENT
    values: dict[str, object] = {"sha256": sha256(CONTENT), "bytes": len(CONTENT), **changes}
    return RemoteFile("weights.bin", f"{server.url}/w", **values)


def leave_part(target: Path, content: bytes) -> None:
    target.parent.mkdir(parents=True)
    part_of(target).write_bytes(content)


def test_a_complete_download_has_its_name_and_leaves_no_part(server: Server, target: Path) -> None:
    seen: list[tuple[int, int] | None] = []
    found = download(offered(server), target, {}, lambda text, progress=None: seen.append(progress), QUICK)
    assert found == sha256(CONTENT) and target.read_bytes() == CONTENT
    assert not part_of(target).exists()
    assert seen[0] == (0, len(CONTENT)) and seen[-1] == (len(CONTENT), len(CONTENT))


def test_a_download_resumes_where_it_stopped(server: Server, target: Path) -> None:
    leave_part(target, CONTENT[:1000])
    download(offered(server), target, {}, silent, QUICK)
    assert target.read_bytes() == CONTENT
    assert server.asked == [("/w", "bytes=1000-")]


def test_a_whole_part_needs_no_request(server: Server, target: Path) -> None:
    leave_part(target, CONTENT)
    download(offered(server), target, {}, silent, QUICK)
    assert target.read_bytes() == CONTENT and not server.asked


def test_a_line_that_goes_dead_is_taken_up_again(server: Server, target: Path) -> None:
    server.break_after, server.breaks = 30_000, 2
    download(offered(server), target, {}, silent, QUICK)
    assert target.read_bytes() == CONTENT
    assert [wanted for _, wanted in server.asked][:2] == [None, "bytes=30000-"]


def test_a_line_that_brings_nothing_is_given_up_and_the_part_kept(server: Server, target: Path) -> None:
    leave_part(target, CONTENT[:500])
    server.break_after = 0
    with pytest.raises(SourceFault, match=r"broke off .*; 500 of 102400 bytes are kept"):
        download(offered(server), target, {}, silent, QUICK)
    assert len(server.asked) == QUICK.attempts
    assert part_of(target).read_bytes() == CONTENT[:500] and not target.exists()


def test_a_trickle_is_given_up_and_the_part_kept(server: Server, target: Path) -> None:
    server.stall_s = 0.3
    with pytest.raises(SourceFault, match=r"no answer in time\); 2 of 102400 bytes are kept"):
        download(offered(server), target, {}, silent, Patience(read_s=0.1, attempts=2, pause_s=0))
    assert part_of(target).read_bytes() == CONTENT[:2] and not target.exists()


def test_a_transfer_that_gains_ground_is_never_given_up(server: Server, target: Path) -> None:
    server.break_after = 20_000
    download(offered(server), target, {}, silent, Patience(attempts=1, gain_bytes=10_000, pause_s=0))
    assert target.read_bytes() == CONTENT and len(server.asked) == 6


def test_a_server_that_ignores_range_starts_the_file_again(server: Server, target: Path) -> None:
    leave_part(target, b"x" * 1000)
    server.ignore_range = True
    download(offered(server), target, {}, silent, QUICK)
    assert target.read_bytes() == CONTENT


def test_a_server_that_answers_with_another_range_starts_the_file_again(server: Server, target: Path) -> None:
    leave_part(target, CONTENT[:1000])
    server.shift_range = True
    download(offered(server), target, {}, silent, QUICK)
    assert target.read_bytes() == CONTENT
    assert [wanted for _, wanted in server.asked] == ["bytes=1000-", None]


def test_a_server_that_refuses_the_range_starts_the_file_again(server: Server, target: Path) -> None:
    leave_part(target, CONTENT[:1000])
    server.refuse_range = True
    download(offered(server), target, {}, silent, QUICK)
    assert target.read_bytes() == CONTENT
    assert [wanted for _, wanted in server.asked] == ["bytes=1000-", None]


def test_a_busy_server_is_asked_again(server: Server, target: Path) -> None:
    server.statuses = [503, 429]
    download(offered(server), target, {}, silent, QUICK)
    assert target.read_bytes() == CONTENT


def test_a_missing_file_is_not_asked_for_twice(server: Server, target: Path) -> None:
    remote = offered(server)
    server.files.clear()
    with pytest.raises(SourceFault, match="status 404"):
        download(remote, target, {}, silent, QUICK)
    assert len(server.asked) == 1


@pytest.mark.parametrize("digest", ["sha256", "git_blob"])
def test_a_corrupted_download_is_never_renamed(server: Server, target: Path, digest: str) -> None:
    expected = {"sha256": sha256, "git_blob": git_blob}[digest](CONTENT)
    remote = offered(server, **{"sha256": None, digest: expected})
    server.files["/w"] = CONTENT[:-1] + b"?"
    with pytest.raises(SourceFault) as caught:
        download(remote, target, {}, silent, QUICK)
    assert expected in str(caught.value) and sha256(CONTENT) != caught.value.values["found"]
    assert not target.exists() and not part_of(target).exists()


def test_a_bad_part_is_found_out_and_the_next_start_succeeds(server: Server, target: Path) -> None:
    leave_part(target, b"x" * 1000)
    with pytest.raises(SourceFault, match="is not the expected file"):
        download(offered(server), target, {}, silent, QUICK)
    download(offered(server), target, {}, silent, QUICK)
    assert target.read_bytes() == CONTENT


def test_a_git_blob_id_is_enough(server: Server, target: Path) -> None:
    download(offered(server, sha256=None, git_blob=git_blob(CONTENT)), target, {}, silent, QUICK)
    assert target.read_bytes() == CONTENT


def test_more_than_announced_is_refused(server: Server, target: Path) -> None:
    with pytest.raises(SourceFault, match=r"more .* than the 100 bytes"):
        download(offered(server, bytes=100), target, {}, silent, QUICK)
    assert not target.exists() and part_of(target).stat().st_size == 0


def test_a_file_that_is_already_right_is_not_fetched(server: Server, target: Path) -> None:
    download(offered(server), target, {}, silent, QUICK)
    server.asked.clear()
    assert download(offered(server), target, {}, silent, QUICK) == sha256(CONTENT)
    assert not server.asked


def test_a_file_that_is_wrong_is_replaced(server: Server, target: Path) -> None:
    target.parent.mkdir()
    target.write_bytes(b"?" * len(CONTENT))
    download(offered(server), target, {}, silent, QUICK)
    assert target.read_bytes() == CONTENT


def test_a_full_disk_is_refused_before_the_first_byte(
    server: Server, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(0, 0, 4_000))
    with pytest.raises(InputError) as caught:
        download(offered(server), target, {}, silent, QUICK)
    assert "4000 bytes free" in str(caught.value) and "102400 are needed" in str(caught.value)
    assert not isinstance(caught.value, SourceFault) and not server.asked


def test_only_the_remaining_bytes_count_against_the_disk(
    server: Server, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_part(target, CONTENT[:100_000])
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(0, 0, 4_000))
    download(offered(server), target, {}, silent, QUICK)
    assert target.read_bytes() == CONTENT


def test_a_disk_that_fills_up_on_the_way_is_one_sentence(
    server: Server, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(partial: Partial, chunk: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Partial, "append", full)
    with pytest.raises(InputError, match="No space left on device"):
        download(offered(server), target, {}, silent, QUICK)


def test_an_unwritable_place_is_one_sentence(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        download(offered(server), tmp_path / "file" / "below", {}, silent, QUICK)


def test_ctrl_c_leaves_the_part(server: Server, target: Path) -> None:
    def interrupt(text: str, progress: tuple[int, int] | None = None) -> None:
        if progress and progress[0]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download(offered(server), target, {}, interrupt, QUICK)
    kept = part_of(target).read_bytes()
    assert kept and CONTENT.startswith(kept) and not target.exists()


def test_two_that_fetch_the_same_file_do_not_hurt_each_other(server: Server, target: Path) -> None:
    remote, results = offered(server), []
    server.break_after, server.breaks = 9_000, 2
    workers = [
        threading.Thread(target=lambda: results.append(download(remote, target, {}, silent, QUICK)))
        for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert results == [sha256(CONTENT)] * 3 and target.read_bytes() == CONTENT
    starts = [wanted for _, wanted in server.asked]
    assert len(set(starts)) == len(starts), "only one of them fetched"


def test_nobody_there_is_said_at_once(target: Path) -> None:
    with pytest.raises(SourceFault, match=r"127\.0\.0\.1 could not be reached: the connection was refused"):
        download(RemoteFile("w", "http://127.0.0.1:9/w", 5), target, {}, silent, QUICK)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(have=st.integers(0, 5_000), cut=st.integers(1, 3_000), ignore=st.booleans())
def test_whatever_was_there_and_wherever_it_breaks_the_file_is_whole(
    server: Server, tmp_path_factory: pytest.TempPathFactory, have: int, cut: int, ignore: bool
) -> None:
    target = tmp_path_factory.mktemp("any") / "w"
    content = CONTENT[:4_000]
    server.files["/small"] = content
    server.break_after, server.breaks, server.ignore_range = cut, 2, ignore
    part_of(target).write_bytes(content[:have] if have <= 4_000 else b"?" * have)
    remote = RemoteFile("w", f"{server.url}/small", 4_000, sha256=sha256(content))
    download(remote, target, {}, silent, Patience(attempts=4, pause_s=0))
    assert target.read_bytes() == content and not part_of(target).exists()
