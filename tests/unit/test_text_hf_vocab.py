"""What is read from a tokenizer's folder: bos, eos and merges; and one clear line where it cannot be used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Encoder
from tokenizers import decoders, models

from agentserve.text import TextError, Tokenizer, hf_vocab, load
from tests.hf_tokenizers import byte_level, save
from tests.text_models import save_model, source


@pytest.mark.parametrize(
    ("config", "framed"),
    [
        ({"add_bos_token": False}, (False, False)),
        ({"add_bos_token": True, "add_eos_token": True}, (True, True)),
        ({"add_eos_token": False}, (True, False)),
    ],
)
def test_the_config_decides_on_bos_and_eos(
    tmp_path: Path, config: dict[str, object], framed: tuple[bool, bool]
) -> None:
    ours = Tokenizer(hf_vocab.vocabulary(save(byte_level(), tmp_path, **config)))
    ids = ours.encode_completion("x")
    assert (ids[0] == ours.control["<s>"], ids[-1] in ours.eos_ids) == framed


def test_a_config_and_a_generation_config_that_differ_both_count(tmp_path: Path) -> None:
    save_model(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    (tmp_path / "config.json").write_text('{"eos_token_id": [6]}')
    template_file = tmp_path / "chat_template.jinja"
    template_file.write_text(source("qwen25"))
    text = load(tmp_path)
    ends = {5, 6, text.tokenizer.control["</s>"], text.tokenizer.control["<|im_end|>"]}
    assert text.end_ids == tuple(sorted(ends))


def test_every_eos_of_the_generation_config_counts(tmp_path: Path) -> None:
    folder = save(byte_level(), tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    ours = Tokenizer(hf_vocab.vocabulary(folder))
    assert ours.eos_ids == {5, 7, ours.control["</s>"]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no tokenizer.json"),
        ("{", "not valid JSON"),
        ("[1]", "a JSON object is expected"),
        ('{"version": "1.0"}', "tokenizer.json"),
        ('{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}', "not supported"),
        ('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}', "decoder"),
    ],
)
def test_a_folder_that_cannot_be_used(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TextError, match=words):
        hf_vocab.vocabulary(tmp_path)


def test_merges_cannot_build_a_control_token(tmp_path: Path) -> None:
    """`<s>` is a control token and also what merges of ordinary tokens make."""
    vocab = {"<s>": 0, "<": 1, "s": 2, ">": 3, "<s": 4}
    encoder = Encoder(models.BPE(vocab=vocab, merges=[("<", "s"), ("<s", ">")]))
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens(["<s>"])
    encoder.save(str(tmp_path / "tokenizer.json"))
    assert Encoder(models.BPE(vocab=vocab, merges=[("<", "s"), ("<s", ">")])).encode("<s>").ids == [0]
    ours = Tokenizer(hf_vocab.vocabulary(tmp_path))
    assert ours.encode_rendered("<s>") == [0]
    assert ours.encode("<s>") == [4, 3]


def spoiled(folder: Path, change: Callable[[dict[str, Any]], None]) -> str:
    """The one line with which a model fails whose `tokenizer.json` was changed so."""
    save_model(folder)
    path = folder / "tokenizer.json"
    definition = json.loads(path.read_text("utf-8"))
    change(definition)
    path.write_text(json.dumps(definition))
    with pytest.raises(TextError) as raised:
        load(folder)
    text = str(raised.value)
    assert folder.name in text
    assert "\n" not in text
    assert len(text) < 400
    return text


def test_an_id_far_from_the_others_makes_no_table(tmp_path: Path) -> None:
    def change(definition: dict[str, Any]) -> None:
        definition["model"]["vocab"]["a"] = 4_000_000_000

    assert "tokenizer.json: id 4000000000 in a vocabulary of " in spoiled(tmp_path, change)


def test_an_added_token_outside_the_vocabulary(tmp_path: Path) -> None:
    def change(definition: dict[str, Any]) -> None:
        definition["added_tokens"][0]["id"] = 4_000_000_000

    assert "has the id 4000000000" in spoiled(tmp_path, change)


def processor_of(token: str) -> dict[str, Any]:
    only = {"Sequence": {"id": "A", "type_id": 0}}
    pair = [only, {"Sequence": {"id": "B", "type_id": 1}}]
    single = [{"SpecialToken": {"id": token, "type_id": 0}}, only]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": {}}


def test_a_post_processor_with_a_token_nobody_knows(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def change(definition: dict[str, Any]) -> None:
        definition["post_processor"] = {"type": "Sequence", "processors": [processor_of("<nope>")]}

    assert "the post-processor does not define its token '<nope>'" in spoiled(tmp_path, change)
    assert capfd.readouterr().err == ""  # no stack trace of the package's


class PanicException(BaseException):
    """As the tokenizers package's: no Exception, and with no name that could be imported."""


@pytest.mark.parametrize(
    "error", [PanicException("no entry\nfor key"), MemoryError(), RecursionError("deep")]
)
def test_what_nobody_foresaw_is_one_line_too(
    tmp_path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(folder: Path) -> None:
        raise error

    monkeypatch.setattr(hf_vocab, "vocabulary", fails)
    assert type(error).__name__ in spoiled(tmp_path, lambda definition: None)


def test_an_interruption_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(folder: Path) -> None:
        raise KeyboardInterrupt

    save_model(tmp_path)
    monkeypatch.setattr(hf_vocab, "vocabulary", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load(tmp_path)


def test_a_template_without_end(tmp_path: Path) -> None:
    save_model(tmp_path)
    with pytest.raises(TextError, match=r"chat template /dev/zero: larger than 4 MiB"):
        load(tmp_path, Path("/dev/zero"))
