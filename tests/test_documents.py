"""Documents that cannot lie: the trees, the commands, the links and the versions they name."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path, PurePosixPath
from xml.etree import ElementTree

import pytest

import decodescope
from repository import PACKAGE, READMES, ROOT, SECTION, below, blocks, files, text

DOCUMENTS = sorted(p.relative_to(ROOT).as_posix() for p in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))
CALM_S = 240  # a command needs seconds; a busy machine gets time


def annotated_tree(readme: str) -> dict[PurePosixPath, bool]:
    """Path -> whether it is a room, as the README draws them; every entry has a phrase."""
    (block,) = [block for block in blocks(text(readme), "text") if block.startswith("decodescope/\n")]
    found: dict[PurePosixPath, bool] = {}
    rooms: list[tuple[int, PurePosixPath]] = [(0, PurePosixPath())]
    for line in block.splitlines()[1:]:
        entry = re.fullmatch(r"( +)(\S+)  +(\S.*)", line)
        assert entry, f"{readme}: {line!r} is not an indented name and a phrase"
        indent, name = len(entry[1]), entry[2]
        while rooms[-1][0] >= indent:
            rooms.pop()
        path = rooms[-1][1] / name
        assert path not in found, f"{readme} draws {path} twice"
        found[path] = name.endswith("/")
        if found[path]:
            rooms.append((indent, path))
    return found


@pytest.mark.parametrize("readme", READMES)
def test_the_annotated_tree_is_the_tree_in_git(readme):
    drawn = annotated_tree(readme)
    rooms = {path for path, is_room in drawn.items() if is_room}
    folded = rooms - {parent for path in drawn for parent in path.parents}
    for file in files():
        is_the_room_itself = file.name == "__init__.py" and file.parent in rooms
        inside_a_folded_one = folded.intersection(file.parents)
        assert file in drawn or is_the_room_itself or inside_a_folded_one, f"{readme} does not draw {file}"
    assert drawn.keys() - rooms <= set(files()), f"{readme} draws files that are not there"
    assert rooms <= {parent for file in files() for parent in file.parents}, f"{readme} draws empty rooms"


def test_both_readmes_draw_the_same_tree_in_the_same_order():
    first, second = (list(annotated_tree(readme)) for readme in READMES)
    assert first == second


def shell_lines(readme: str) -> list[str]:
    """The commands of all shell blocks, without remarks."""
    lines = [line for block in blocks(text(readme), "sh") for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def test_both_readmes_hold_the_same_commands_in_the_same_order():
    first, second = map(shell_lines, READMES)
    assert first == second
    assert blocks(text(READMES[0]), "python") == blocks(text(READMES[1]), "python")


@pytest.mark.parametrize("readme", READMES)
def test_the_readmes_hold_the_two_commands_and_ten_to_try_each_with_a_line_of_why(readme):
    targets = re.findall(r"^([\w-]+):", text("Makefile"), re.MULTILINE)
    assert shell_lines(readme)[:2] == ["make demo", "make test"]
    assert {"demo", "test"} <= set(targets)
    (block,) = blocks(below(text(readme), SECTION["try"]), "sh")
    pairs = [part.splitlines() for part in block.strip().split("\n\n")]
    assert len(pairs) == 10
    assert all(why.startswith("# ") and command.startswith("decodescope ") for why, command in pairs)


ENVIRONMENT = {**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONPATH": str(ROOT / "src")}


def run_here(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=ENVIRONMENT, stdin=subprocess.DEVNULL,
        capture_output=True, encoding="utf-8", timeout=CALM_S,
    )  # fmt: skip


def test_every_command_to_try_runs_in_their_order(starter_path, small_path, tmp_path):
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    lines = [line for line in shell_lines(READMES[0]) if line.startswith("decodescope ")]
    assert len(lines) > 20
    for line in lines:
        if not is_about_a_server(line):
            done = run_here(["-m", *shlex.split(line)], tmp_path)
            assert done.returncode == 0, f"{line}: {done.stderr}"
            assert done.stdout.strip(), f"{line} says nothing"


def is_about_a_server(line: str) -> bool:
    return line.endswith(" &") or "http://" in line


def free_port() -> str:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return str(asked.getsockname()[1])


def test_the_server_of_the_readme_is_there_and_answers_those_who_ask(small_path, tmp_path):
    port = free_port()
    serve, *asking = [line.replace("8000", port) for line in shell_lines(READMES[0]) if is_about_a_server(line)]
    assert serve.startswith("decodescope serve ") and len(asking) == 2
    arguments = [sys.executable, "-m", *shlex.split(serve.removesuffix(" &"))]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(arguments, cwd=tmp_path, env=ENVIRONMENT, stdout=log, stderr=log)
    try:
        wait_for_port(int(port), server)
        for line in asking:
            if not line.startswith("curl") or shutil.which("curl"):
                line = line.replace("decodescope ", f"{sys.executable} -m decodescope ")
                done = subprocess.run(
                    ["bash", "-c", line], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, timeout=CALM_S
                )
                assert done.returncode == 0, f"{line}: {done.stderr.decode()}"
                assert b"logprob" in done.stdout or b"tokens" in done.stdout, f"{line}: {done.stdout.decode()}"
    finally:
        server.terminate()
        assert server.wait(60) == 0, (tmp_path / "log").read_text()


def wait_for_port(port: int, server: subprocess.Popen[bytes]) -> None:
    """Until the server hears."""
    for _ in range(10 * CALM_S):
        assert server.poll() is None, "the server is gone"
        with socket.socket() as asked:
            if asked.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError("the server never came")


def test_the_python_of_the_readme_runs(small_path, tmp_path):
    (block,) = blocks(text(READMES[0]), "python")
    done = run_here(["-c", block.replace('"starter"', '"starter-small"')], tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 2


def commands() -> set[str]:
    from decodescope.cli.app import app

    groups = {str(group.name) for group in app.registered_groups}
    return groups | {str(command.callback.__name__) for command in app.registered_commands if command.callback}


@pytest.mark.parametrize("readme", READMES)
def test_a_command_said_to_be_missing_is_missing_and_a_command_shown_is_there(readme):
    paragraph = below(text(readme), SECTION["missing"]).strip().split("\n\n")[0]
    missing = set(re.findall(r"`([a-z]+)`", paragraph))
    assert missing and not missing & commands()
    used = {line.split()[1] for line in shell_lines(readme) if line.startswith("decodescope ")}
    assert used <= commands()


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_pictures_show_the_recorded_run_and_load_nothing_from_elsewhere(language):
    picture = text(f"docs/images/run.{language}.svg")
    shown = "".join(ElementTree.fromstring(picture).itertext()).replace("\xa0", " ")
    assert "大语言模型是一种人工智能模型" in shown
    assert ("summary" if language == "en" else "小结") in shown
    assert "url(http" not in picture and "@font-face" not in picture


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_local_link_leads_to_a_file(document):
    prose = re.sub(r"^```.*?^```", "", text(document), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)\s#]+)", prose)
    for link in links:
        if not link.startswith(("http://", "https://")):
            assert (ROOT / document).parent.joinpath(link).exists(), f"{document} links to {link}"


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if d not in (*READMES, "docs/log.md")])
def test_every_module_a_document_names_is_there(document):
    for name in re.findall(r"`((?:[\w.-]+/)*\w+\.py)`", text(document)):
        places = (ROOT / name, PACKAGE / name, *PACKAGE.glob(f"*/{name}"))
        assert any(place.is_file() for place in places), f"{document} names {name}"


def test_the_newest_version_of_the_changelog_is_the_programs():
    newest = re.search(r"^## \[(\d+\.\d+\.\d+)\]", text("CHANGELOG.md"), re.MULTILINE)
    assert newest and newest[1] == decodescope.__version__
    assert tomllib.loads(text("pyproject.toml"))["project"]["version"] == decodescope.__version__


def test_every_decision_is_numbered_in_order_and_short():
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    for number, path in enumerate(decisions, start=1):
        assert path.name.startswith(f"{number:04d}-")
        assert path.read_text(encoding="utf-8").startswith(f"# {number}. ")
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 40
    assert len(text("CONTRIBUTING.md").splitlines()) < 80
