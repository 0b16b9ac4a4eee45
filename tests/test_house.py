"""The limits of the house, read off the syntax trees."""

import ast
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest

import decodescope
from repository import PACKAGE, ROOT, files, modules

LONGEST_FUNCTION, LONGEST_FILE, MOST_PARAMETERS = 60, 300, 6
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
READABLE = {".py", ".md", ".json", ".toml", ".txt", ".svg", ""}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(*folders: str) -> Iterator[tuple[str, Function]]:
    for path, tree in modules(*folders).items():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                yield f"{path}:{node.lineno} {node.name}", node


def parameters(function: Function) -> list[str]:
    """Names of the parameters, those of the object itself left out."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return [argument.arg for argument in every if argument and argument.arg not in ("self", "cls")]


def test_no_function_is_too_long():
    everywhere = functions("src", "scripts", "benchmarks")
    long = [name for name, node in everywhere if (node.end_lineno or 0) - node.lineno >= LONGEST_FUNCTION]
    assert not long


def test_no_file_of_the_package_is_too_long():
    lengths = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in modules("src")}
    assert not {path: length for path, length in lengths.items() if length > LONGEST_FILE}


def test_no_function_outside_the_command_line_takes_too_many_parameters():
    greedy = [
        name
        for name, node in functions("src", "scripts", "benchmarks")
        if len(parameters(node)) > MOST_PARAMETERS and not name.startswith("src/decodescope/cli/")
    ]
    assert not greedy


def test_no_room_is_a_lumber_room():
    names = {part for file in files() for part in PurePosixPath(file).with_suffix("").parts}
    assert not names & FORBIDDEN_NAMES


def test_the_session_is_only_wiring():
    assert len((PACKAGE / "session.py").read_text(encoding="utf-8").splitlines()) < 200


def test_nothing_is_left_for_later():
    marks = ("TO" + "DO", "FIX" + "ME", "X" * 3)
    for file in files():
        if file.suffix in READABLE and file.name != "LICENSE":
            content = (ROOT / file).read_text(encoding="utf-8")
            assert not [mark for mark in marks if mark in content], f"{file} leaves something for later"


def reexported(tree: ast.Module) -> set[str]:
    """Public names that a package's first module imports, for type checkers or at once."""
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in froms if (node.module or "").startswith("decodescope")]
    return {alias.asname or alias.name for node in ours for alias in node.names}


def listed(tree: ast.Module) -> list[str] | None:
    """The names in `__all__`; None where there is none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return None


@pytest.mark.parametrize("path", sorted(p for p in modules("src") if p.endswith("__init__.py")))
def test_all_is_sorted_and_complete(path):
    tree = modules("src")[path]
    names, offered = listed(tree), reexported(tree)
    if names is None:
        assert not offered, f"{path} imports {offered} without __all__"
    else:
        assert names == sorted(names)
        assert set(names) == offered


def test_every_public_name_loads_and_no_other_does():
    for name in decodescope.__all__:
        assert getattr(decodescope, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Sesion'"):
        decodescope.Sesion  # noqa: B018
