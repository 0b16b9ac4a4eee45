"""Where a server listens and with which token: decided before a model is loaded."""

import os
import socket
import stat
from pathlib import Path

import pytest

from decodescope.errors import InputError
from decodescope.monitor.servers import TOKEN_VARIABLE
from decodescope.web.address import listen, write_token
from decodescope.web.guard import LOCAL_NAMES

GOOD = "a-token-of-some-length"


@pytest.fixture(autouse=True)
def no_token_around(monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


def test_a_made_token_has_256_bits_and_is_never_the_same():
    one, other = (listen("127.0.0.1", 0, None, ()) for _ in range(2))
    one.socket.close(), other.socket.close()
    assert len(one.token) == 43 and one.token != other.token
    assert one.url == f"http://127.0.0.1:{one.port}/?token={one.token}"


@pytest.mark.parametrize("given, around, expected", [(GOOD, None, GOOD), (None, GOOD, GOOD), ("x", GOOD, "x")])
def test_a_given_token_is_used_and_not_shown(monkeypatch, given, around, expected):
    if around:
        monkeypatch.setenv(TOKEN_VARIABLE, around)
    listening = listen("localhost", 0, given, ())
    listening.socket.close()
    assert listening.token == expected
    assert listening.url == f"http://localhost:{listening.port}/"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "server.lan"])
@pytest.mark.parametrize("token", [None, "short"])
def test_an_address_that_others_can_reach_needs_a_token_of_the_users_own(host, token):
    with pytest.raises(InputError, match=TOKEN_VARIABLE):
        listen(host, 0, token, ())


def test_with_such_a_token_it_may_be_any_address_and_answers_to_the_names_allowed():
    listening = listen("0.0.0.0", 0, GOOD, ("My.Lan", "192.0.2.7"))
    listening.socket.close()
    assert listening.hosts == LOCAL_NAMES | {"my.lan", "192.0.2.7"}
    assert listening.url == f"http://127.0.0.1:{listening.port}/"


@pytest.mark.parametrize(
    "token",
    [
        "",
        "with space",
        "zwölf",
        b"tab\\t".decode("unicode_escape"),
        b"line\\n".decode("unicode_escape"),
    ],
)
def test_a_token_that_no_header_can_carry_is_refused(token):
    with pytest.raises(InputError, match="ASCII"):
        listen("127.0.0.1", 0, token, ())


@pytest.mark.parametrize("name", ["", "*", "http://x", "x:80", "x/y", "a b", "x@y", ".x", "münchen"])
def test_a_name_to_allow_is_a_name(name):
    with pytest.raises(InputError, match="allow-host"):
        listen("127.0.0.1", 0, GOOD, (name,))


@pytest.mark.parametrize("port", [-1, 65536])
def test_there_are_65535_ports(port):
    with pytest.raises(InputError, match=str(port)):
        listen("127.0.0.1", port, GOOD, ())


def test_a_port_in_use_is_a_fault_at_once():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match="use"):
            listen("127.0.0.1", taken.getsockname()[1], GOOD, ())


def test_the_token_file_is_its_owners_alone_whatever_was_there(tmp_path):
    path, elsewhere = tmp_path / "token", tmp_path / "elsewhere"
    elsewhere.write_text("untouched")
    path.symlink_to(elsewhere)
    write_token(path, GOOD)
    assert path.read_text() == GOOD
    assert stat.S_IMODE(os.lstat(path).st_mode) == 0o600 and not path.is_symlink()
    assert elsewhere.read_text() == "untouched"
    assert sorted(tmp_path.iterdir()) == [elsewhere, path]


def test_a_token_file_that_cannot_be_written_is_a_fault(tmp_path):
    with pytest.raises(InputError, match="nowhere"):
        write_token(tmp_path / "nowhere" / "token", GOOD)


@pytest.mark.parametrize("path", [".", "/", ".."])
def test_a_folder_is_no_token_file(path):
    with pytest.raises(InputError, match="cannot be written"):
        write_token(Path(path), GOOD)
