"""A long text has the ids of the whole, however it is encoded, and takes no more than a piece does."""

from __future__ import annotations

import json
import random

import pytest
from tokenizers import Encoding, Regex, pre_tokenizers
from tokenizers import Tokenizer as Encoder

from agentserve.models.source import resolve
from agentserve.text import cuts, hf_vocab, load, pieces
from agentserve.text.pieces import encode
from agentserve.text.pretokenizers import PRETOKENIZERS, PreTokenizer
from agentserve.text.vocabulary import Encoders
from tests.hf_tokenizers import KINDS, byte_level, save

SPACES = (" ", " ", " ", "\n", "  ", "\n\n", "\t", "", " \n ", "\r\n", "\u00a0")
WORDS = (
    "Hello", "world", "I'm", "x", "_y", "123", "1234567", "3.14", "e\u0301a", "\u0301", "你好", "👍🏽", "<b>",
    "!!", "...", "Zürich", "ﬁ", "Привет", "'s", '"a":1,', "{}", "a" * 40, "9" * 30,
    '{"name":"x_1","is":[1,22,333,4444]}', "foo(bar=1)", "A.B", "#x", "a\u0301", '"\u0301',
)  # fmt: skip

# What words of megabytes are made of: each alphabet by itself, joined to others by a word or nothing.
ALPHABETS = (
    "a", "ab", "etaoin", "aA", "AB", "0", "0123456789", "!", "!?.,;'", "'s", "\"{}:,", "你好世界", "ЯзыкПр",
    "👍😀", " ", "\n", " \n", " \t\r\n", "\u2003\u00a0", "\n ", "a1", "a!", "!1", "a你", "é", "e\u0301\u0323",
    "각ᄀ\u1161\u11a8", "a\u200d", "\x00\x1f", "▁ ", "_", "ſﬁ", "\ufffd", "aaaaaaaaaaaaaaaab",
)  # fmt: skip


def run_of(rng: random.Random) -> str:
    return "".join(rng.choices(rng.choice(ALPHABETS), k=rng.choice((900, 1500, 3000))))


def text_of_runs(rng: random.Random) -> str:
    return "".join(
        rng.choice((run_of(rng), rng.choice(WORDS), rng.choice(SPACES))) for _ in range(rng.randrange(2, 9))
    )


def text_of(rng: random.Random, size: int) -> str:
    out, length = [], 0
    while length < size:
        out.append(rng.choice(WORDS) + rng.choice(SPACES))
        length += len(out[-1])
    return "".join(out)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", 1000)
    monkeypatch.setattr(cuts, "AHEAD", 200)
    monkeypatch.setattr(pieces, "SHORT", 500)


def same(encoders: Encoders, seed: int, size: int = 6000) -> None:
    rng = random.Random(seed)
    texts = [text_of(rng, size) for _ in range(20)] + [run_of(rng) + text_of_runs(rng) for _ in range(60)]
    for text in texts:
        for where in {id(encoder): encoder for encoder in (encoders.first, encoders.joined)}.values():
            [whole] = where.encode_batch_fast([text], add_special_tokens=False)
            assert encode(text, where, encoders.joined).tolist() == whole.ids, text


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_of_encoder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    same(hf_vocab.vocabulary(save(KINDS[kind](), tmp_path_factory.mktemp(kind))).encoders, 1)


def test_a_real_one() -> None:
    same(load(resolve("smollm2-135m").path).tokenizer._encoders, 2)


@pytest.mark.parametrize(
    "rule", sorted(set(PRETOKENIZERS.values()), key=repr), ids=lambda rule: rule.patterns[0][:9]
)
def test_every_way_of_finding_words(rule: PreTokenizer) -> None:
    encoder = byte_level()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    encoder.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    if not rule.nfc:
        encoder.normalizer = None  # type: ignore[assignment]
    same(Encoders(encoder, encoder, encoder), 3, 4000)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Characters of each part that was encoded."""
    found: list[int] = []
    real = pieces._encoded

    def counted(encoder: Encoder, text: str) -> Encoding:
        found.append(len(text))
        return real(encoder, text)

    monkeypatch.setattr(pieces, "_encoded", counted)
    return found


def test_no_more_than_pieces_are_encoded_at_once(sizes: list[int]) -> None:
    encoder = byte_level()
    prose = "Hello world, this is\nprose. " * 400
    encode(prose, encoder, encoder)
    assert max(sizes) == pieces.PIECE
    assert sum(sizes) < 2 * len(prose)
    sizes.clear()
    written = json.dumps([{"name": f"k{i}", "value": i} for i in range(400)], separators=(",", ":"))
    encode(written, encoder, encoder)
    assert max(sizes) == pieces.PIECE
    sizes.clear()
    line = "{};" * 1000 + " word word " * 300
    encode(line, encoder, encoder)
    assert sum(sizes) < 4 * len(line)


@pytest.mark.parametrize("alphabet", ALPHABETS)
@pytest.mark.parametrize("kind", ["byte_level", "metaspace_first", "prepend_always"])
def test_a_word_without_an_end_is_cut_too(
    kind: str, alphabet: str, sizes: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """By byte-pair encoders."""
    encoders = hf_vocab.vocabulary(save(KINDS[kind](), tmp_path_factory.mktemp(kind))).encoders
    rng = random.Random(alphabet)
    text = "\n" + "".join(rng.choices(alphabet, k=20_000))
    ids = encode(text, encoders.first, encoders.joined)
    assert max(sizes) < 2 * pieces.PIECE
    assert sum(sizes) < 8 * len(text)
    [whole] = encoders.first.encode_batch_fast([text], add_special_tokens=False)
    assert ids.tolist() == whole.ids


def test_a_long_text_that_is_none_is_refused() -> None:
    encoder = byte_level()
    with pytest.raises((TypeError, UnicodeEncodeError)):
        encode("word " * 500 + "\ud800", encoder, encoder)
