"""What the user may type, and what is said when it means nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loopback import sha256

from decodescope import errors
from decodescope.errors import InputError
from decodescope.locale import catalogue, set_language
from decodescope.models import describe, find_model, hash_model, hashes
from decodescope.models.ollama import MODEL_LAYER


def make_folder(path: Path, **files: str) -> Path:
    path.mkdir()
    for name, text in ({"config.json": "{}", "model.safetensors": "w"} | files).items():
        (path / name).write_text(text)
    return path


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    found = find_model(str(folder))
    assert (found.source, found.path, found.bytes, found.revision) == ("folder", folder, 3, None)
    lines = f"{sha256(b'w')}  model.safetensors\n", f"{sha256(b'{}')}  config.json\n"
    assert found.sha256 == sha256("".join(sorted(lines)).encode())


def test_a_gguf_file_is_taken_by_suffix_or_magic(tmp_path: Path) -> None:
    for name in ("a.gguf", "blob"):
        (tmp_path / name).write_bytes(b"GGUF....")
        found = find_model(str(tmp_path / name))
        assert (found.source, found.bytes, found.sha256) == ("file", 8, sha256(b"GGUF...."))


def test_a_relative_path_and_the_home_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "m")
    assert find_model("m").path == tmp_path / "m"
    (tmp_path / "home").mkdir()
    make_folder(tmp_path / "home" / "n")
    assert find_model("~/n").path == tmp_path / "home" / "n"


@pytest.mark.parametrize("spec", ["./gone", "/gone", "~/gone", "gone.gguf", "a/b/c", "..\\gone", "org/gone.gguf"])
def test_a_path_that_is_not_there_is_named(spec: str) -> None:
    with pytest.raises(InputError) as caught:
        find_model(spec)
    assert caught.value.key == "pull.no_path" and spec in str(caught.value)


@pytest.mark.parametrize(
    "spec", ["", "name", "org/", "/", "org/..", "ms:name", "ms:../..", "\0", "a" * 5000, "~nobody-x"]
)
def test_what_means_nothing_is_one_sentence(spec: str) -> None:
    with pytest.raises(InputError):
        find_model(spec)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spec=st.text(st.sampled_from("ab/.:@~-_\\ 汉\0*"), max_size=9))
def test_any_text_gives_files_or_one_sentence(spec: str, own_places: Path) -> None:
    try:
        found = find_model(spec, download=False)
    except InputError as fault:
        assert str(fault)
    else:
        assert found.path.exists()


def test_an_empty_folder_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    with pytest.raises(InputError, match="is empty"):
        find_model(str(tmp_path / "m"))


def test_a_folder_without_configuration_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "model.safetensors").write_text("w")
    with pytest.raises(InputError, match=r"has no config\.json"):
        find_model(str(folder))
    (folder / "q4.gguf").write_text("w")
    with pytest.raises(InputError, match=r"GGUF files \(q4\.gguf\)"):
        find_model(str(folder))


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"1234567")
    with pytest.raises(InputError, match="is not a GGUF file"):
        find_model(str(tmp_path / "model.safetensors"))
    with pytest.raises(InputError, match="is not a GGUF file"):
        find_model(os.devnull)


def test_a_hash_is_computed_once_and_again_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF1")
    assert find_model(str(file)).sha256 == sha256(b"GGUF1")
    read: list[str] = []
    find_model(str(file), lambda text, progress=None: read.append(text))
    assert not read
    file.write_bytes(b"GGUF2")
    os.utime(file, ns=(1, 1))
    assert find_model(str(file), lambda text, progress=None: read.append(text)).sha256 == sha256(b"GGUF2")
    assert read


def test_a_big_file_is_hashed_only_when_asked_and_then_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashes, "PLAIN_LIMIT_BYTES", 10)
    file, folder = tmp_path / "a.gguf", make_folder(tmp_path / "m", **{"tokenizer.json": "x" * 20})
    file.write_bytes(b"GGUF" * 5)
    for path in (file, folder):
        found = find_model(str(path))
        assert found.sha256 is None and "sha256 not computed" in describe(found)
        full = hash_model(found)
        assert full.sha256 and find_model(str(path)).sha256 == full.sha256


def test_a_damaged_ledger_only_costs_time(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF1")
    ledger = Path(os.environ["DECODESCOPE_CACHE"]) / "hashes.json"
    ledger.parent.mkdir()
    for damage in ("{", "[]", json.dumps({str(file): 7}), json.dumps({str(file): {"sha256": "0" * 64}})):
        ledger.write_text(damage)
        assert find_model(str(file)).sha256 == sha256(b"GGUF1")


def test_an_unwritable_cache_does_not_keep_a_local_file_from_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "not-a-folder").write_text("")
    monkeypatch.setenv("DECODESCOPE_CACHE", str(tmp_path / "not-a-folder" / "cache"))
    (tmp_path / "a.gguf").write_bytes(b"GGUF1")
    assert find_model(str(tmp_path / "a.gguf")).sha256 == sha256(b"GGUF1")


# Ollama


def put_ollama(root: Path, content: bytes, where: str = "registry.ollama.ai/library/tiny/latest") -> Path:
    blob = root / "blobs" / f"sha256-{sha256(content)}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    layers = [
        {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:" + "0" * 64},
        {"mediaType": MODEL_LAYER, "digest": f"sha256:{sha256(content)}", "size": len(content)},
    ]
    manifest = root / "manifests" / where
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return blob


@pytest.fixture
def ollama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    return tmp_path / "ollama"


@pytest.mark.parametrize(
    ("spec", "where", "tag"),
    [
        ("tiny", "registry.ollama.ai/library/tiny/latest", "latest"),
        ("qwen2.5:0.5b", "registry.ollama.ai/library/qwen2.5/0.5b", "0.5b"),
        ("someone/tiny", "registry.ollama.ai/someone/tiny/latest", "latest"),
        ("hf.co/org/tiny:Q4_K_M", "hf.co/org/tiny/Q4_K_M", "Q4_K_M"),
    ],
)
def test_an_ollama_model_is_its_blob(spec: str, where: str, tag: str, ollama: Path) -> None:
    blob = put_ollama(ollama, b"GGUF....", where)
    found = find_model(f"ollama:{spec}")
    assert (found.path, found.source, found.revision) == (blob, "ollama", tag)
    assert found.sha256 == sha256(b"GGUF....")


def test_ollama_s_folder_in_the_home_is_looked_into(tmp_path: Path) -> None:
    blob = put_ollama(tmp_path / "home" / ".ollama" / "models", b"GGUF....")
    assert find_model("ollama:tiny").path == blob


def test_an_unknown_ollama_model_names_the_folders(ollama: Path) -> None:
    with pytest.raises(InputError, match=f"no other in {ollama}"):
        find_model("ollama:other")


def test_a_missing_blob_is_named(ollama: Path) -> None:
    put_ollama(ollama, b"GGUF....").unlink()
    with pytest.raises(InputError, match=r"which is missing: `ollama pull tiny`"):
        find_model("ollama:tiny")


def test_a_blob_with_another_digest_is_refused(ollama: Path) -> None:
    put_ollama(ollama, b"GGUF....").write_bytes(b"GGUF,,,,")
    with pytest.raises(InputError, match="is not the expected file"):
        find_model("ollama:tiny")


@pytest.mark.parametrize(
    "manifest",
    [
        "{",
        "[]",
        "{}",
        '{"layers": 3}',
        json.dumps({"layers": [{"mediaType": MODEL_LAYER, "digest": "sha256:../../x"}]}),
    ],
)
def test_a_damaged_manifest_is_one_sentence(manifest: str, ollama: Path) -> None:
    put_ollama(ollama, b"GGUF....")
    (ollama / "manifests/registry.ollama.ai/library/tiny/latest").write_text(manifest)
    with pytest.raises(InputError, match="not an Ollama manifest"):
        find_model("ollama:tiny")


@pytest.mark.parametrize(
    "spec", ["../../x", "x/../../../y", "", ":", "a:../b", "/etc/passwd", "a/b/c/d", "a b", "~x"]
)
def test_path_tricks_in_an_ollama_name_are_refused(spec: str, ollama: Path) -> None:
    with pytest.raises(InputError) as caught:
        find_model(f"ollama:{spec}")
    assert caught.value.key == "pull.ollama_name"


# The room as a whole


def test_a_model_that_is_here_is_found_without_loading_anything_that_speaks_http(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    code = (
        "import sys; from decodescope.models import find_model; find_model(sys.argv[1]);"
        "print(*sorted({'httpx2', 'huggingface_hub', 'torch'} & sys.modules.keys()))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a.gguf")]
    loaded = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(errors.__file__).parents[1])},
    )
    assert loaded.stdout.strip() == ""


def test_both_languages_say_where_a_model_came_from(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    found = find_model(str(tmp_path / "a.gguf"))
    for code in ("en", "zh"):
        set_language(code)
        line = describe(found)
        assert str(found.sha256) in line and str(found.path) in line
        assert catalogue(code)["pull.source.file"] in line
