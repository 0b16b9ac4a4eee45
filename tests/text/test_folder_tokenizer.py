"""Tokenizers from Hugging Face folders: ids and BOS as transformers', and broken files."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mixed_corpus import CORPUS
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from decodescope.errors import InputError
from decodescope.text.tokenizer import Tokenizer, open_tokenizer

TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"


def byte_level_backend() -> Backend:
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|eot|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return backend


def sentencepiece_backend() -> Backend:
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    backend.train_from_iterator(["the model writes one token after another"], trainer)
    tree = json.loads(backend.to_str())
    tree["added_tokens"] = tree["added_tokens"][:3]  # the bytes are entries, not tokens matched whole
    return Backend.from_str(json.dumps(tree))


def save(backend: Backend, folder: Path, **config: Any) -> Path:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    fast.save_pretrained(folder)
    # The plain class: what tokenizer.json says is what counts, not what a family's class makes of it.
    update(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", **config)
    return folder


def update(path: Path, **values: Any) -> None:
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(old | values))


@pytest.fixture(scope="module")
def byte_level_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(byte_level_backend(), tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def sentencepiece_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(sentencepiece_backend(), tmp_path_factory.mktemp("pieces"))


@pytest.fixture
def folder(byte_level_folder: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    shutil.copytree(byte_level_folder, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("which", ["byte_level_folder", "sentencepiece_folder"])
def test_ids_and_text_equal_those_of_transformers(which: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(which)
    ours, reference = open_tokenizer(path), AutoTokenizer.from_pretrained(path)
    for text in CORPUS:
        ids = reference.encode(text, add_special_tokens=False)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == reference.decode(ids)
    assert ours.size == len(reference)


def test_a_saved_starter_tokenizer_equals_the_one_from_gguf(
    starter: Tokenizer, starter_reference: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    starter_reference.save_pretrained(tmp_path)
    ours = Tokenizer.from_folder(tmp_path)
    assert [ours.encode(text) for text in CORPUS] == [starter.encode(text) for text in CORPUS]
    assert [ours.stages(text).pieces for text in CORPUS] == [starter.stages(text).pieces for text in CORPUS]
    assert ours.special_ids == starter.special_ids and not ours.adds_bos
    assert ours.chat_template == starter.chat_template
    assert ours.names["eos_token"] == "<|im_end|>"


@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": False}])
@pytest.mark.parametrize("form", ["$A", "<s> $A", "<s> $A </s>"])
def test_bos_and_eos_are_those_of_the_post_processor_as_in_transformers(
    folder: Path, form: str, config: dict[str, bool]
) -> None:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    bos, eos = backend.token_to_id("<s>"), backend.token_to_id("</s>")
    backend.post_processor = processors.TemplateProcessing(
        single=form, special_tokens=[("<s>", bos), ("</s>", eos)]
    )
    backend.save(str(folder / "tokenizer.json"))
    update(folder / "tokenizer_config.json", **config)
    ours, reference = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    assert (ours.before == (bos,)) == ours.adds_bos == ("<s>" in form)
    assert [*ours.before, *ours.encode("hello"), *ours.after] == reference.encode("hello")
    assert ours.encode("hello") == reference.encode("hello", add_special_tokens=False)


def test_offsets_are_whole_although_the_file_would_trim_them(folder: Path) -> None:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    backend.enable_truncation(4)
    backend.save(str(folder / "tokenizer.json"))
    text = "one  token \n after another"
    spans = list(Tokenizer.from_folder(folder).encode_spans(text))
    assert "".join(text[start:end] for _, start, end in spans) == text


def test_end_ids_are_those_of_all_three_files(folder: Path) -> None:
    eos = Tokenizer.from_folder(folder).token_id("</s>")
    assert Tokenizer.from_folder(folder).end_ids == {eos}
    update(folder / "generation_config.json", eos_token_id=[2, 300])
    update(folder / "config.json", eos_token_id=17)
    assert Tokenizer.from_folder(folder).end_ids == {eos, 2, 300, 17}


def test_the_chat_template_may_lie_in_a_file_of_its_own_or_among_several(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    for value, expected in [("plain", "plain"), (several, "d"), (several[:1], None), (None, None)]:
        update(folder / "tokenizer_config.json", chat_template=value)
        assert Tokenizer.from_folder(folder).chat_template == expected
    (folder / "chat_template.jinja").write_text("from a file")
    assert Tokenizer.from_folder(folder).chat_template == "from a file"


def test_special_tokens_may_be_written_as_objects_or_only_in_the_map(folder: Path) -> None:
    update(folder / "tokenizer_config.json", bos_token={"content": "<s>", "lstrip": False})
    assert Tokenizer.from_folder(folder).names["bos_token"] == "<s>"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["bos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<|eot|>"}}))
    assert Tokenizer.from_folder(folder).names["bos_token"] == "<|eot|>"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", b"", "not a usable tokenizer"),
        ("tokenizer.json", b"{}", "not a usable tokenizer"),
        ("tokenizer.json", b"\xff\xfe", "not a usable tokenizer"),
        ("tokenizer.json", b"[" * 100_000, "not a usable tokenizer"),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json"),
        ("tokenizer_config.json", b"[" * 100_000, "tokenizer_config.json"),
        ("tokenizer_config.json", b'{"chat_template": 3}', "tokenizer_config.json"),
        ("special_tokens_map.json", b"{", "special_tokens_map.json"),
        ("generation_config.json", b'{"eos_token_id": "2"}', "generation_config.json"),
        ("generation_config.json", b'{"eos_token_id": [1, -2]}', "generation_config.json"),
        ("config.json", b'{"eos_token_id": true}', "config.json"),
        ("chat_template.jinja", b"\xff\xfe", "chat_template.jinja"),
    ],
)
def test_a_broken_file_is_named(folder: Path, name: str, content: bytes, says: str) -> None:
    if name == "tokenizer_config.json":
        (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / name).write_bytes(content)
    with pytest.raises(InputError) as fault:
        Tokenizer.from_folder(folder)
    assert says in str(fault.value)


def test_a_folder_without_tokenizer_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        open_tokenizer(tmp_path)


def test_an_oversized_tokenizer_is_not_read(folder: Path) -> None:
    with (folder / "tokenizer.json").open("r+b") as file:
        file.truncate(300 << 20)  # sparse: takes no space
    with pytest.raises(InputError, match="256 MB"):
        Tokenizer.from_folder(folder)


def test_a_vocabulary_of_another_kind_is_refused(tmp_path: Path) -> None:
    backend = Backend(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match="WordPiece"):
        Tokenizer.from_folder(tmp_path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_mutilated_tokenizer_raises_anything_but_a_sentence(
    byte_level_folder: Path, tmp_path: Path, data: st.DataObject
) -> None:
    tree = json.loads((byte_level_folder / "tokenizer.json").read_text())
    key = data.draw(st.sampled_from([*tree, *(("model", inner) for inner in tree["model"])]))
    odd = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=4), st.just([]), st.just({}))
    if isinstance(key, tuple):
        tree["model"][key[1]] = data.draw(odd)
    else:
        tree[key] = data.draw(odd)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    try:
        Tokenizer.from_folder(tmp_path).stages("hello 世界 <think>")
    except InputError as fault:
        assert str(fault)
