"""The hub, a mirror and ModelScope, spoken to over HTTP."""

import json
import shutil
import socket
import time
from collections import namedtuple
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import constants
from loopback import COMMIT, Publish, Server

from decodescope.errors import InputError
from decodescope.locale import set_language
from decodescope.models import describe, find_model, hub, network
from decodescope.models.cache import cache_root
from decodescope.models.layout import choose
from decodescope.models.network import Patience
from decodescope.models.records import SourceFault

MODEL = {
    "config.json": b'{"model_type": "qwen2"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights" * 1000,
    "README.md": b"# not needed",
    "pytorch_model.bin": b"pickle",
    "onnx/model.safetensors": b"elsewhere",
}
NEEDED = ["config.json", "model.safetensors", "tokenizer.json"]


def paths_asked(server: Server) -> list[str]:
    return [path for path, _ in server.asked if "/api/models" not in path and "repo/files" not in path]


def test_a_hub_model_becomes_a_folder_with_only_what_is_needed(on_hub: Publish) -> None:
    on_hub("org/name", MODEL)
    found = find_model("org/name")
    assert sorted(path.name for path in found.path.iterdir() if path.name[0] != ".") == NEEDED
    assert (found.source, found.revision, found.cached) == ("mirror", COMMIT, False)
    assert found.bytes == sum(len(MODEL[name]) for name in NEEDED)
    assert found.path.parts[-3:] == ("hub", "org--name", COMMIT)


def test_a_folder_has_one_hash_wherever_it_came_from(
    on_hub: Publish, on_modelscope: Publish, tmp_path: Path
) -> None:
    on_hub("org/name", MODEL)
    on_modelscope("org/name", MODEL)
    by_hand = tmp_path / "by-hand"
    by_hand.mkdir()
    for name in [*NEEDED, "README.md"]:
        (by_hand / name).write_bytes(MODEL[name])
    hashes = {find_model(spec).sha256 for spec in ("org/name", "ms:org/name", str(by_hand))}
    assert len(hashes) == 1 and None not in hashes


def test_a_fetched_model_is_found_again_without_a_network(on_hub: Publish, server: Server) -> None:
    on_hub("org/name", MODEL)
    first = find_model("org/name")
    server.asked.clear()
    again = find_model("org/name", download=False)
    assert again.cached and not server.asked
    assert (again.path, again.sha256, again.source) == (first.path, first.sha256, first.source)
    assert "already on this machine" in describe(again) and COMMIT in describe(again)
    assert find_model(f"org/name@{COMMIT}", download=False).path == first.path


def test_another_revision_is_another_model(on_hub: Publish) -> None:
    on_hub("org/name", MODEL)
    find_model("org/name")
    with pytest.raises(InputError, match="not on this machine"):
        find_model("org/name@v2", download=False)


def test_a_folder_that_lost_a_file_is_fetched_again(on_hub: Publish) -> None:
    on_hub("org/name", MODEL)
    weights = find_model("org/name").path / "model.safetensors"
    weights.unlink()
    assert not find_model("org/name").cached
    assert weights.read_bytes() == MODEL["model.safetensors"]


def test_an_interrupted_model_goes_on_with_the_missing_files(on_hub: Publish, server: Server) -> None:
    on_hub("org/name", MODEL)
    weights = server.files.pop(f"/org/name/resolve/{COMMIT}/model.safetensors")
    with pytest.raises(InputError, match="status 404"):
        find_model("org/name")
    with pytest.raises(InputError, match="not on this machine"):
        find_model("org/name", download=False)
    server.files[f"/org/name/resolve/{COMMIT}/model.safetensors"] = weights
    server.asked.clear()
    find_model("org/name")
    assert paths_asked(server) == [f"/org/name/resolve/{COMMIT}/model.safetensors"]


def test_a_token_is_sent_to_the_hub(on_hub: Publish, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    on_hub("org/name", MODEL)
    monkeypatch.setenv("HF_TOKEN", "secret-of-the-test")
    listing = hub.listing("org/name", "main")
    assert listing.headers == {"Authorization": "Bearer secret-of-the-test"}
    assert "secret" not in repr(listing)


def test_the_user_s_own_hub_cache_is_used(tmp_path: Path) -> None:
    root = Path(constants.HF_HUB_CACHE) / "models--org--name"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    snapshot = root / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "model-1.safetensors").write_bytes(b"w")
    with pytest.raises(InputError, match="could not be reached"):
        find_model("org/name")  # a shard is missing
    (snapshot / "model-2.safetensors").write_bytes(b"w")
    found = find_model("org/name")
    assert (found.path, found.source, found.revision, found.cached) == (snapshot, "hub", COMMIT, True)


@pytest.mark.parametrize("place", ["hub/models/org/na___me", "models/org/na.me", "hub/org/na.me"])
def test_modelscope_s_own_cache_is_used(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "ms"))
    folder = tmp_path / "ms" / place
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"w")
    found = find_model("ms:org/na.me")
    assert (found.path, found.source, found.cached) == (folder, "modelscope", True)


def test_a_modelscope_model_knows_its_whole_commit(on_modelscope: Publish) -> None:
    on_modelscope("org/name", MODEL)
    found = find_model("ms:org/name")
    assert (found.source, found.revision) == ("modelscope", COMMIT)
    assert (found.path / "model.safetensors").read_bytes() == MODEL["model.safetensors"]
    assert find_model("ms:org/name", download=False).cached


@pytest.mark.parametrize("spec", ["org/name", "ms:org/name"])
def test_a_corrupted_weight_file_is_refused(
    spec: str, server: Server, on_hub: Publish, on_modelscope: Publish
) -> None:
    on_hub("org/name", MODEL)
    on_modelscope("org/name", MODEL)
    for path in server.files:
        if path.endswith("model.safetensors"):
            server.files[path] = b"WEIGHTS" * 1000
    with pytest.raises(InputError, match="is not the expected file"):
        find_model(spec)
    assert not list(cache_root().rglob("model.safetensors*"))


@pytest.mark.parametrize("name", ["../evil.json", "/etc/evil", "a/../../evil", "..\\evil", "C:evil"])
@pytest.mark.parametrize("spec", ["org/name", "ms:org/name"])
def test_a_listing_that_leads_out_of_its_folder_is_refused(
    spec: str, name: str, server: Server, on_hub: Publish, on_modelscope: Publish, tmp_path: Path
) -> None:
    files = {**MODEL, name: b"evil"}
    on_hub("org/name", files)
    on_modelscope("org/name", files)
    with pytest.raises(InputError, match="leads out of its folder"):
        find_model(spec)
    assert not paths_asked(server) and not list(tmp_path.rglob("*evil*"))


def test_a_repository_of_pickles_is_refused(on_hub: Publish, server: Server) -> None:
    on_hub("org/name", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    with pytest.raises(InputError, match="only pickled weights"):
        find_model("org/name")
    assert not paths_asked(server)


def test_a_repository_of_gguf_files_names_them(on_hub: Publish) -> None:
    on_hub("org/name-GGUF", {"q4.gguf": b"GGUF"})
    with pytest.raises(InputError, match=r"only GGUF files \(q4\.gguf\)"):
        find_model("org/name-GGUF")


def test_a_repository_without_weights_says_so(on_hub: Publish) -> None:
    on_hub("org/name", {"config.json": b"{}"})
    with pytest.raises(InputError, match=r"no config\.json with safetensors"):
        find_model("org/name")


def test_a_second_copy_of_the_weights_is_left_out() -> None:
    names = ["consolidated.safetensors", "model-1.safetensors", "model.safetensors.index.json", "config.json"]
    assert choose(names) == sorted(names[1:])
    assert choose(["weights.safetensors"]) == ["weights.safetensors"]


def test_the_disk_is_checked_for_the_whole_model(
    on_hub: Publish, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_hub("org/name", MODEL)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(0, 0, 7_000))
    with pytest.raises(InputError, match=r"7000 bytes free, but 7025 are needed"):
        find_model("org/name")
    assert not paths_asked(server)


def test_nobody_at_the_hub_is_one_sentence_and_the_way_out() -> None:
    with pytest.raises(InputError) as caught:
        find_model("org/name")
    text = str(caught.value)
    assert "127.0.0.1:9 could not be reached: the connection was refused." in text
    assert "-m FOLDER" in text and "ms:" not in text
    set_language("zh")
    assert "-m ms:" in str(caught.value)


def test_an_offline_hub_is_not_asked(on_hub: Publish, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    on_hub("org/name", MODEL)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match="HF_HUB_OFFLINE is set"):
        find_model("org/name")
    assert not server.asked


@pytest.mark.parametrize(
    ("status", "sentence"), [(404, "status 404|has no org/name"), (500, "status 500"), (302, "org/name|status")]
)
def test_a_hub_that_refuses_is_one_sentence(status: int, sentence: str, on_hub: Publish, server: Server) -> None:
    on_hub("org/name", MODEL)
    server.statuses = [status] * 8
    with pytest.raises(InputError, match=sentence):
        find_model("org/name")


@pytest.mark.parametrize(
    "answer", [b"<html>login</html>", b"[]", b'{"id": "x", "siblings": [{"rfilename": "a"}]}']
)
def test_a_hub_that_talks_nonsense_is_one_sentence(answer: bytes, on_hub: Publish, server: Server) -> None:
    on_hub("org/name", MODEL)
    server.files["/api/models/org/name/revision/main"] = answer
    with pytest.raises(InputError, match="not a list of model files"):
        find_model("org/name")


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (b"<html>login</html>", "not a list of model files"),
        (b'{"Data": {"Files": [{"Path": "a"}]}}', "not a list of model files"),
        (b'{"Data": {"Files": [{"Path": "a", "Type": "blob", "Size": -4}]}}', "not a list of model files"),
        (b'{"Data": {"Files": null}}', "no revision master"),
        (b'{"Code": 404, "Data": null, "Success": false}', "has no org/name"),
    ],
)
def test_a_modelscope_that_talks_nonsense_is_one_sentence(
    answer: bytes, sentence: str, on_modelscope: Publish, server: Server
) -> None:
    on_modelscope("org/name", MODEL)
    server.files["/api/v1/models/org/name/repo/files"] = answer
    with pytest.raises(InputError, match=sentence):
        find_model("ms:org/name")


def test_a_look_up_that_hangs_is_left_behind() -> None:
    started = time.monotonic()
    with pytest.raises(SourceFault, match=r"far\.example could not be reached: no answer in time"):
        network.look_up("far.example", lambda: time.sleep(1.5), Patience(look_up_s=0.1))
    assert time.monotonic() - started < 1


def test_a_name_that_cannot_be_resolved_is_said_so() -> None:
    def ask() -> None:
        try:
            raise socket.gaierror(-2, "Name or service not known")
        except socket.gaierror as error:
            raise httpx2.ConnectError("[Errno -2]") from error

    with pytest.raises(SourceFault, match=r"nowhere\.example could not be .*: the name could not be resolved"):
        network.look_up("nowhere.example", ask)


def test_an_endpoint_that_is_no_address_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "no-address")
    with pytest.raises(InputError, match="no-address could not be reached"):
        find_model("org/name")
