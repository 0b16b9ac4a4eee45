"""Fetching from strangers: over a real socket, bounded, and one clear sentence for whatever is wrong."""

import gzip
import time

import pytest
from exposed import llama_server, sends, served, sglang, vllm
from hypothesis import given
from hypothesis import strategies as st

from decodescope.errors import InputError
from decodescope.monitor import scrape as scraping
from decodescope.monitor.metrics import Metrics
from decodescope.monitor.scrape import address_of, read, scrape, token_from
from decodescope.monitor.servers import TOKEN_VARIABLE


def fails(key: str, address: str, **more: str) -> InputError:
    with pytest.raises(InputError) as caught:
        scrape(address_of(address, **more))
    assert caught.value.key == f"monitor.{key}"
    return caught.value


@pytest.mark.parametrize(
    "text, server, models",
    [
        (Metrics("ours").exposition()[0].decode(), "decodescope", ("ours",)),
        (vllm(), "vLLM", ("Qwen/Qwen2.5-7B-Instruct",)),
        (sglang(), "SGLang", ("Qwen/Qwen2.5-7B-Instruct",)),
        (llama_server(), "llama-server", ()),
    ],
)
def test_servers_are_told_apart_by_their_names(text, server, models):
    with served(sends(lambda: text)) as address:
        found = scrape(address_of(address))
    assert (found.server.name, found.models) == (server, models)


@pytest.mark.parametrize(
    "given, url, shown, token",
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000/metrics", "http://127.0.0.1:8000/metrics", None),
        ("http://h:8000/", "http://h:8000/metrics", "http://h:8000/metrics", None),
        ("https://h/llm/metrics", "https://h/llm/metrics", "https://h/llm/metrics", None),
        ("http://h:1/?token=secret", "http://h:1/metrics", "http://h:1/metrics", "secret"),
        ("http://h:1/metrics?model=a&token=s#x", "http://h:1/metrics?model=a", "http://h:1/metrics", "s"),
        ("http://me:pw@h:1", "http://me:pw@h:1/metrics", "http://h:1/metrics", None),
    ],
)
def test_an_address_may_be_short_and_what_is_shown_holds_no_secret(given, url, shown, token, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    address = address_of(given)
    assert (str(address.url), address.shown, address.token) == (url, shown, token)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_the_token_of_the_environment_is_for_servers_on_this_machine(host, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    assert address_of(f"{host}:8000").token == "secret"
    assert address_of(f"{host}:8000", "given").token == address_of(f"{host}:8000/?token=given").token == "given"


@pytest.mark.parametrize("host", ["192.0.2.1", "example.org", "127.0.0.1.example.org", "0.0.0.0"])
def test_nobody_elses_server_is_sent_the_token_of_the_environment(host, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    assert address_of(f"{host}:8000").token is None


def test_a_token_that_is_given_comes_before_one_in_the_address():
    assert address_of("h:1/?token=a", "b").token == "b"


@pytest.mark.parametrize(
    "text", ["", "http://", "ftp://h", "file:///etc/passwd", "h:99999", "http://[::1", "http://h:80:80"]
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(InputError, match="no address"):
        address_of(text)


def test_the_token_is_sent_and_a_wrong_one_is_named():
    seen = []

    def answer(request) -> None:
        seen.append(request.headers["Authorization"])
        status = 200 if seen[-1] == "Bearer right" else 401
        sends(llama_server, status)(request)

    with served(answer) as address:
        assert scrape(address_of(address, "right")).server.name == "llama-server"
        fails("token", address, token="wrong")
        fails("token", address)
    assert seen == ["Bearer right", "Bearer wrong", None]


def test_a_redirection_is_not_followed_and_the_token_stays_here():
    elsewhere = []

    def other(request) -> None:
        elsewhere.append(request.path)
        sends(llama_server)(request)

    with served(other) as target, served(sends(lambda: "", 302, Location=f"http://{target}/metrics")) as address:
        fails("status", address, token="secret")
    assert not elsewhere


@pytest.mark.parametrize("status", [404, 500, 503])
def test_a_status_that_is_no_success_is_told(status):
    with served(sends(lambda: "", status)) as address:
        assert fails("status", address).values["status"] == status


def test_nobody_there_is_told():
    with served(sends(lambda: "")) as address:
        pass
    assert "127.0.0.1" in str(fails("unreachable", address))


@pytest.mark.parametrize(
    "text", ["hello there", "<html>\n", "a{b} 1", '{"a": 1}', 'vllm:x{le="1"} one', "\x00\x01", "a 1 2 3 4"]
)
def test_what_is_no_exposition_is_told(text):
    with served(sends(lambda: text)) as address, pytest.raises(InputError) as caught:
        scrape(address_of(address))
    assert caught.value.key in ("monitor.not_metrics", "monitor.unknown")


@pytest.mark.parametrize("text", ["", "# TYPE a gauge\na 1\n", "process_resident_memory_bytes 1\n"])
def test_metrics_of_no_known_server_are_told(text):
    with served(sends(lambda: text)) as address:
        fails("unknown", address)


@given(st.text())
def test_whatever_a_stranger_sends_is_read_or_refused_in_one_sentence(text):
    try:
        read(llama_server() + text, 0.0, "there")
    except InputError as fault:
        assert "there" in str(fault)


def test_more_than_metrics_come_to_is_not_read_on(monkeypatch):
    sent = []

    def endless(request) -> None:
        request.send_response(200)
        request.end_headers()
        try:
            while len(sent) < 10_000:
                request.wfile.write(b"vllm:x 1\n" * 8192)
                sent.append(1)
        except OSError:
            return

    monkeypatch.setattr(scraping, "MOST_BYTES", 1 << 20)
    with served(endless) as address:
        fails("too_much", address)
    assert len(sent) < 1000


def test_what_is_packed_is_not_unpacked():
    packed = gzip.compress(vllm().encode() + b"# " + b"x" * (64 << 20))
    with served(sends(lambda: packed, Content_Encoding="gzip")) as address:
        started = time.monotonic()
        with pytest.raises(InputError, match=r"no Prometheus text|no server"):
            scrape(address_of(address))
    assert time.monotonic() - started < 2


def test_a_line_with_labels_without_end_is_refused_at_once():
    line = "vllm:num_requests_running{" + ",".join(f'a{i}="b"' for i in range(500_000)) + "} 1\n"
    started = time.monotonic()
    with served(sends(lambda: line)) as address:
        fails("not_metrics", address)
    assert time.monotonic() - started < 2


def test_what_drips_without_end_is_given_up(monkeypatch):
    def dripping(request) -> None:
        request.send_response(200)
        request.end_headers()
        try:
            for _ in range(100):
                request.wfile.write(b"# \n")
                time.sleep(0.05)
        except OSError:
            return

    monkeypatch.setattr(scraping, "_WHOLE_SECONDS", 0.3)
    with served(dripping) as address:
        started = time.monotonic()
        fails("too_much", address)
    assert time.monotonic() - started < 3


def test_too_many_series_are_refused(monkeypatch):
    monkeypatch.setattr(scraping, "_MOST_SAMPLES", 100)
    many = "".join(f'vllm:num_requests_running{{engine="{i}"}} 1\n' for i in range(101))
    with served(sends(lambda: many)) as address:
        fails("too_much", address)
    others = llama_server() + "".join(f'unknown{{a="{i}"}} 1\n' for i in range(500))
    with served(sends(lambda: others)) as address:
        assert scrape(address_of(address)).server.name == "llama-server"


def test_names_of_models_are_few_and_short():
    text = "".join(f'vllm:num_requests_running{{model_name="{"x" * 1000}{i}"}} 1\n' for i in range(100))
    text += "".join(f'vllm:num_requests_running{{model_name="{i}"}} 1\n' for i in range(100))
    models = read(text, 0.0, "there").models
    assert len(models) <= 16 and max(map(len, models)) <= 200


def test_a_token_is_read_from_a_file(tmp_path):
    path = tmp_path / "token"
    path.write_text("abc\n")
    assert token_from(path) == "abc"
    path.write_text("\n")
    with pytest.raises(InputError, match="no token"):
        token_from(path)
    with pytest.raises(InputError, match="cannot be read"):
        token_from(tmp_path / "none")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="cannot be read"):
        token_from(path)
