"""GGUF metadata and vocabularies, against ids taken from llama.cpp."""

from __future__ import annotations

import json
import struct
import unicodedata
from pathlib import Path

import pytest

from agentserve.text import TextError, Tokenizer, load
from agentserve.text.gguf_metadata import Metadata, read_metadata
from agentserve.text.gguf_vocab import vocabulary
from agentserve.text.pretokenizers import PRETOKENIZERS
from tests.text_models import DATA, smollm2_path

GOLDEN = json.loads((DATA / "llamacpp_smollm2.json").read_text("utf-8"))
PRES = json.loads((DATA / "llamacpp_pre.json").read_text("utf-8"))["pre"]
SENTENCEPIECE = json.loads((DATA / "llamacpp_sentencepiece.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def smollm2() -> Metadata:
    return read_metadata(smollm2_path())


def small(**changes: object) -> Metadata:
    """Metadata of the small SentencePiece vocabulary."""
    parts = SENTENCEPIECE["vocabulary"]
    metadata: Metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": parts["tokens"],
        "tokenizer.ggml.token_type": parts["types"],
        "tokenizer.ggml.scores": parts["scores"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    metadata.update({f"tokenizer.ggml.{key}": value for key, value in changes.items()})  # type: ignore[misc]
    return metadata


# --- against llama.cpp -------------------------------------------------------------------


@pytest.mark.model
def test_smollm2_equals_llamacpp(smollm2: Metadata) -> None:
    tokenizer = Tokenizer(vocabulary(smollm2))
    for case in GOLDEN["cases"]:
        text = case["text"]
        assert tokenizer.encode(text) == case["plain"], text
        assert tokenizer.encode_rendered(text) == case["special"], text
        assert tokenizer.encode_completion(text) == case["framed"], text
        assert tokenizer.decode(case["plain"]) == text
        assert tokenizer.decode(case["special"], skip_control=False) == text


@pytest.mark.model
@pytest.mark.parametrize("pre", PRES)
def test_every_pretokenizer_equals_llamacpp(smollm2: Metadata, pre: str) -> None:
    """SmolLM2's vocabulary cut by another family's rules; llama.cpp read the same file."""
    metadata = {key: value for key, value in smollm2.items() if key != "tokenizer.ggml.add_bos_token"}
    tokenizer = Tokenizer(vocabulary({**metadata, "tokenizer.ggml.pre": pre}))
    compared = 0
    for index, case in enumerate(GOLDEN["cases"]):
        text = case["text"]
        if PRETOKENIZERS[pre].nfc and not unicodedata.is_normalized("NFC", text):
            continue  # llama.cpp leaves out the NFC step of the published tokenizer
        assert tokenizer.encode(text) == PRES[pre]["differs"].get(str(index), case["plain"]), text
        compared += 1
    assert compared > 70
    assert tokenizer.encode_completion("")[:1] == PRES[pre]["prefix"]


@pytest.mark.model
def test_the_golden_ids_tell_the_pretokenizers_apart(smollm2: Metadata) -> None:
    assert all(PRES[pre]["differs"] for pre in PRES)


@pytest.mark.model
def test_qwen2_normalises_to_nfc(smollm2: Metadata) -> None:
    tokenizer = Tokenizer(vocabulary({**smollm2, "tokenizer.ggml.pre": "qwen2"}))
    assert tokenizer.encode("Cafe\u0301") == tokenizer.encode("Caf\u00e9")


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_equals_llamacpp(prefix: bool) -> None:
    tokenizer = Tokenizer(vocabulary(small(add_space_prefix=prefix)))
    for case in SENTENCEPIECE["prefix" if prefix else "bare"]:
        text = case["text"]
        assert tokenizer.encode_rendered(text) == case["special"], text
        if "tool_call" in text:  # llama.cpp lets users write it; here it is a control token
            assert not set(tokenizer.control.values()) & set(tokenizer.encode(text))
            continue
        assert tokenizer.encode(text) == case["plain"], text
        assert tokenizer.encode_completion(text) == case["framed"], text


def test_sentencepiece_round_trip() -> None:
    for prefix in (True, False):
        tokenizer = Tokenizer(vocabulary(small(add_space_prefix=prefix)))
        for case in SENTENCEPIECE["bare"]:
            text = case["text"]
            # "▁" is the vocabulary's own space; behind a token the vocabulary's author added
            # (a double line break here) llama.cpp begins a new word, and so do we.
            added = prefix and ("\n\n" in text or "    " in text)
            if "▁" not in text and not added:
                assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_continued_run_gets_no_prefix_space() -> None:
    tokenizer = Tokenizer(vocabulary(small(add_space_prefix=True)))
    hello = tokenizer.encode("hello")
    joined = tokenizer.encode_rendered("hello\U000f0000hello", spliced={"\U000f0000": []})
    assert joined[: len(hello)] == hello
    assert tokenizer.decode(joined) == "hellohello"


def test_eos_and_frame() -> None:
    tokenizer = Tokenizer(vocabulary(small(eot_token_id=4, add_eos_token=True)))
    assert tokenizer.eos_ids == {2, 4, tokenizer.control["<|im_end|>"]}
    ids = tokenizer.encode_completion("hello")
    assert (ids[0], ids[-1]) == (1, 2)
    bare = Tokenizer(vocabulary(small(add_bos_token=False)))
    assert bare.encode_completion("hello") == bare.encode("hello")


# --- broken files ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "t5"}, "'t5' is not supported"),
        ({"model": 3}, "has the wrong type"),
        ({"tokens": []}, "tokens is missing"),
        ({"tokens": ["a", 1]}, "wrong type"),
        ({"token_type": [1]}, "must be a list of"),
        ({"bos_token_id": 10**6}, "outside the vocabulary"),
        ({"bos_token_id": "x"}, "wrong type"),
        ({"model": "gpt2", "merges": ["a b"], "pre": "nonsense"}, "unknown pre-tokenizer 'nonsense'"),
        ({"model": "gpt2"}, "merges is missing"),
    ],
)
def test_a_vocabulary_that_cannot_be_used(changes: dict[str, object], words: str) -> None:
    with pytest.raises(TextError, match=words):
        vocabulary(small(**changes))


def gguf(items: bytes, count: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, 0, count) + items


def entry(key: str, kind: int, payload: bytes) -> bytes:
    raw = key.encode()
    return struct.pack("<Q", len(raw)) + raw + struct.pack("<I", kind) + payload


def test_every_metadata_type_is_read(tmp_path: Path) -> None:
    text = struct.pack("<Q", 2) + "é".encode()
    items = [
        entry("u8", 0, b"\x07"),
        entry("i32", 5, struct.pack("<i", -5)),
        entry("f32", 6, struct.pack("<f", 1.5)),
        entry("yes", 7, b"\x01"),
        entry("text", 8, text),
        entry("texts", 9, struct.pack("<IQ", 8, 2) + text + text),
        entry("numbers", 9, struct.pack("<IQ3q", 11, 3, 1, 2, -3)),
        entry("f64", 12, struct.pack("<d", 0.25)),
    ]
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf(b"".join(items), len(items)))
    assert read_metadata(path) == {
        "u8": 7,
        "i32": -5,
        "f32": 1.5,
        "yes": True,
        "text": "é",
        "texts": ["é", "é"],
        "numbers": [1, 2, -3],
        "f64": 0.25,
    }


def test_a_file_that_ends_anywhere_is_a_clear_error(tmp_path: Path) -> None:
    whole = gguf(entry("texts", 9, struct.pack("<IQQ", 8, 1, 3) + b"abc") + entry("n", 5, b"\0\0\0\0"), 2)
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole)
    assert read_metadata(path) == {"texts": ["abc"], "n": 0}
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(TextError, match=r"cut\.gguf"):
            read_metadata(path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"PK\x03\x04 zip", "not a GGUF file"),
        (gguf(b"", 0, version=1), "version 1 is not supported"),
        (gguf(entry("x", 99, b""), 1), "unknown metadata type 99"),
        (gguf(entry("x", 9, struct.pack("<IQ", 8, 2**60)), 1), "ends inside"),
        (gguf(entry("x", 9, struct.pack("<IQ", 4, 2**60)), 1), "ends inside"),
    ],
)
def test_not_a_usable_file(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(TextError, match=words):
        read_metadata(path)


def test_load_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TextError, match="No such file"):
        load(tmp_path / "none.gguf")


@pytest.mark.model
def test_load_reads_smollm2_whole() -> None:
    model = load(smollm2_path())
    assert model.tokenizer.vocab_size == 49152
    assert model.tokenizer.eos_ids == {0, 2}  # <|endoftext|>, <|im_end|>
    assert model.tokenizer.special_ids == set(range(17))
    assert model.template.stop_ids == {2}
    assert model.template.wrapper == "hermes"


def test_scores_decide_on_merges_whatever_the_order_of_ids() -> None:
    """The same vocabulary with its ordinary tokens in reverse gives the same pieces."""
    parts = SENTENCEPIECE["vocabulary"]
    first = parts["types"].index(1)
    order = [*range(first), *reversed(range(first, len(parts["types"])))]
    turned = small(
        tokens=[parts["tokens"][index] for index in order],
        token_type=[parts["types"][index] for index in order],
        scores=[parts["scores"][index] for index in order],
    )
    plain, reverse = Tokenizer(vocabulary(small())), Tokenizer(vocabulary(turned))
    for case in SENTENCEPIECE["prefix"]:
        assert [order[token] for token in reverse.encode(case["text"])] == plain.encode(case["text"])


def test_merges_cannot_build_a_control_token() -> None:
    """A vocabulary may list `<s>` both as a control token and as the result of merges."""
    metadata: Metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": ["<s>", "<", "s", ">", "<s", "<s>x", "x"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1, 1],
        "tokenizer.ggml.merges": ["< s", "<s >", "<s> x"],
    }
    tokenizer = Tokenizer(vocabulary(metadata))
    assert tokenizer.encode_rendered("<s>") == [0]
    for text in ("<s>", "<s>x", "s<s>"):
        assert 0 not in tokenizer.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
