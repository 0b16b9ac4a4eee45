"""The hub and ModelScope on loopback, and an empty home for each test."""

import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants
from loopback import COMMIT, Publish, Server, git_blob, handler, sha256

from decodescope.locale import set_language


@pytest.fixture
def server() -> Iterator[Server]:
    """A server that gives whatever is put into `files`."""
    told = Server()
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler(told))
    told.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield told
    http.shutdown()
    thread.join()
    http.server_close()


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty home and cache, no tokens, no proxies, nobody at home at either hub; English."""
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "MODELSCOPE_CACHE", "OLLAMA_MODELS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DECODESCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    set_language("en")
    yield tmp_path
    set_language(None)


@pytest.fixture
def on_hub(server: Server, monkeypatch: pytest.MonkeyPatch) -> Publish:
    """Publish files as a hub repository; weights are LFS files with a SHA-256, the rest has a git blob id."""
    monkeypatch.setenv("HF_ENDPOINT", server.url)

    def publish(repository: str, files: dict[str, bytes], revision: str = "main") -> None:
        siblings = []
        for name, content in files.items():
            entry: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": git_blob(content)}
            if name.endswith((".safetensors", ".gguf")):
                entry["lfs"] = {"size": len(content), "sha256": sha256(content), "pointerSize": 1}
            siblings.append(entry)
            server.files[f"/{repository}/resolve/{COMMIT}/{name}"] = content
        listing = {"id": repository, "sha": COMMIT, "siblings": siblings}
        server.json(f"/api/models/{repository}/revision/{revision}", listing)

    return publish


@pytest.fixture
def on_modelscope(server: Server, monkeypatch: pytest.MonkeyPatch) -> Publish:
    """Publish files as a ModelScope repository."""
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", server.url)

    def publish(repository: str, files: dict[str, bytes]) -> None:
        route = f"/api/v1/models/{repository}/repo"
        listed: list[dict[str, object]] = [{"Path": "folder", "Type": "tree", "Size": 0}]
        for number, (name, content) in enumerate(files.items()):
            commit = COMMIT if number == 0 else "abad1dea" + "0" * 32
            entry = {"Path": name, "Type": "blob", "Size": len(content), "Revision": commit}
            listed.append({**entry, "Sha256": sha256(content)})
            server.files[f"{route}?{name}"] = content
        data = {"Files": listed, "LatestCommitter": {"Id": "", "ShortId": COMMIT[:8]}}
        server.json(f"{route}/files", {"Code": 200, "Success": True, "Data": data})

    return publish
