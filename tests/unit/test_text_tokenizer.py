"""Hugging Face tokenizers against `transformers`, and the wall between text and control tokens."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agentserve.text import TextError, Tokenizer, hf_vocab
from tests.hf_tokenizers import CONTROLS, KINDS, MARKUP, byte_level, save


@pytest.fixture(scope="module", params=list(KINDS))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    """Ours and theirs, from one folder."""
    folder = save(KINDS[request.param](), tmp_path_factory.mktemp(request.param))
    return Tokenizer(hf_vocab.vocabulary(folder)), AutoTokenizer.from_pretrained(folder)


def spells_no_control(text: str) -> bool:
    return not any(token in text for token in CONTROLS + MARKUP)


WORDS = st.sampled_from(
    ["Hello", " world", "  ", "\n", "\n\n", "\t", "123", "é", "e\u0301", "你好", "👍", "x", "_", "'m", "<"]
)
TEXTS = st.lists(WORDS | st.text(max_size=4), max_size=12).map("".join)
SEGMENTS = st.lists(st.sampled_from(CONTROLS + MARKUP) | TEXTS, max_size=8).map("".join)
slowly = settings(max_examples=150, deadline=None)


@slowly
@given(text=TEXTS.filter(spells_no_control))
def test_plain_prompts_equal_transformers(pair: tuple[Tokenizer, PreTrainedTokenizerFast], text: str) -> None:
    ours, theirs = pair
    assert ours.encode_completion(text) == theirs(text).input_ids


@slowly
@given(text=SEGMENTS)
def test_rendered_text_equals_transformers(
    pair: tuple[Tokenizer, PreTrainedTokenizerFast], text: str
) -> None:
    ours, theirs = pair
    assert ours.encode_rendered(text) == theirs(text, add_special_tokens=False).input_ids


@slowly
@given(text=SEGMENTS)
def test_decode_equals_transformers_and_is_a_fold(
    pair: tuple[Tokenizer, PreTrainedTokenizerFast], text: str
) -> None:
    ours, theirs = pair
    ids = ours.encode_rendered(text)
    assert ours.decode(ids) == theirs.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    fold = ours.detokenizer()
    pushes = [fold.push(token) for token in ids]
    assert "".join([*pushes, fold.flush()]) == ours.decode(ids)
    assert not any("\ufffd" in piece for piece in pushes) or "\ufffd" in text


HOSTILE = st.lists(
    st.sampled_from([*CONTROLS, *MARKUP, "<", "|", ">", "<|st", "art|>", " ", "\0", "start", "0", "3", "▁"]),
    max_size=10,
).map("".join)


@slowly
@given(text=HOSTILE)
def test_plain_text_never_becomes_a_control_token(
    pair: tuple[Tokenizer, PreTrainedTokenizerFast], text: str
) -> None:
    ours, _ = pair
    unknown = ours.control["<unk>"]  # a Unigram model without bytes has nothing else for odd characters
    found = set(ours.encode(text)) & set(ours.control.values())
    assert found <= {unknown}
    spaced = "▁" not in text and not text.startswith(" ")
    if spaced and unknown not in ours.encode(text):
        assert ours.decode(ours.encode(text)).strip() == text.strip()


def test_the_oracle_itself_can_be_injected(pair: tuple[Tokenizer, PreTrainedTokenizerFast]) -> None:
    """What the wall is for: the same text becomes control tokens in a tokenizer without one."""
    ours, theirs = pair
    assert ours.control["<|end|>"] in theirs("a<|end|>").input_ids
    assert ours.control["<|end|>"] not in ours.encode("a<|end|>")


def test_token_bytes_spell_every_token(pair: tuple[Tokenizer, PreTrainedTokenizerFast]) -> None:
    ours, theirs = pair
    assert len(ours.token_bytes) == ours.vocab_size == len(theirs)
    for text in ("Hello world", "café 你好 👍"):
        ids = ours.encode(text)
        if ours.control["<unk>"] not in ids:
            assert b"".join(ours.token_bytes[token] for token in ids).decode().lstrip(" ") == text


# --- details -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bytelevel(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(hf_vocab.vocabulary(save(byte_level(), tmp_path_factory.mktemp("b"))))


def test_half_characters_are_held_back(bytelevel: Tokenizer) -> None:
    ids = [bytelevel.token_bytes.index(bytes([byte])) for byte in "👍".encode()]
    fold = bytelevel.detokenizer()
    assert [fold.push(token) for token in ids] == ["", "", "", "👍"]
    fold = bytelevel.detokenizer()
    assert [fold.push(token) for token in ids[:3]] == ["", "", ""]
    assert fold.flush() == "\ufffd"
    fold = bytelevel.detokenizer()
    assert fold.push(ids[0]) == ""
    assert fold.push(bytelevel.encode("x")[0]) == "\ufffdx"
    assert fold.flush() == ""


def test_special_tokens_are_hidden_and_markup_is_shown(bytelevel: Tokenizer) -> None:
    ids = bytelevel.encode_rendered("<|start|><tool_call>x</tool_call><|end|>")
    assert bytelevel.decode(ids) == "<tool_call>x</tool_call>"
    assert bytelevel.decode(ids, skip_control=False) == "<|start|><tool_call>x</tool_call><|end|>"


def test_ids_outside_the_vocabulary_have_no_text(bytelevel: Tokenizer) -> None:
    assert bytelevel.decode([10**6, -1]) == ""


def test_placeholders_come_back_as_text_inside_one_run(bytelevel: Tokenizer) -> None:
    ids = bytelevel.encode_rendered("Hello\U000f0000 world", restore={0xF0000: "<|end|>"})
    assert ids == bytelevel.encode("Hello<|end|> world")


def test_spliced_ids_are_taken_as_they_are(bytelevel: Tokenizer) -> None:
    newlines = bytelevel.encode("\n") * 2
    ids = bytelevel.encode_rendered("<|start|>user\U000f0001<|end|>", spliced={"\U000f0001": newlines})
    assert ids == [*bytelevel.encode_rendered("<|start|>user"), *newlines, bytelevel.control["<|end|>"]]


def test_a_lone_surrogate_is_a_clear_error(bytelevel: Tokenizer) -> None:
    with pytest.raises(TextError, match="surrogate"):
        bytelevel.encode("a\ud800b")


def test_the_run_cache_is_bounded_and_changes_nothing(tmp_path: Path) -> None:
    vocabulary = hf_vocab.vocabulary(save(byte_level(), tmp_path))
    small, none = Tokenizer(vocabulary, cache_bytes=2000), Tokenizer(vocabulary, cache_bytes=0)
    texts = [f"text number {number % 7} " * (number % 5 + 1) for number in range(60)]
    assert [small.encode(text) for text in texts] == [none.encode(text) for text in texts]
    assert 0 < small._cache.size_bytes <= 2000
    assert none._cache.size_bytes == 0
    small.encode(texts[0]).append(1)  # the caller's list, not the cache's
    assert small.encode(texts[0]) == none.encode(texts[0])


def test_tokens_that_take_white_space(tmp_path: Path) -> None:
    encoder = byte_level()
    encoder.add_special_tokens(
        [
            AddedToken("<|right|>", rstrip=True, special=True, normalized=False),
            AddedToken("<|left|>", lstrip=True, special=True, normalized=False),
            AddedToken("<word>", single_word=True, special=True, normalized=False),
        ]
    )
    save(encoder, tmp_path)
    ours, theirs = Tokenizer(hf_vocab.vocabulary(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    for text in (
        "a <|right|> \n b",
        "a \n<|left|> b",
        "<|right|>  <|left|>",
        "a<word>b <word> c",
        "<|right|> <|end|> x",
    ):
        assert ours.encode_rendered(text) == theirs(text, add_special_tokens=False).input_ids, text


def test_odd_added_letters_stay_ordinary_text(tmp_path: Path) -> None:
    """Some vocabularies add letters whose bytes UTF-8 never uses; users may write those letters."""
    encoder = byte_level()
    encoder.add_tokens([AddedToken("ÿ", normalized=False), AddedToken("    ", normalized=False)])
    save(encoder, tmp_path)
    ours, theirs = Tokenizer(hf_vocab.vocabulary(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("aÿb", "x    y", "ÿ"):
        assert ours.encode(text) == theirs(text, add_special_tokens=False).input_ids
    assert "ÿ" not in ours.control


def test_other_threads_go_on_while_a_long_text_is_encoded(bytelevel: Tokenizer) -> None:
    """A long run is encoded with the interpreter's lock released, to the same ids."""
    text = "1, ab\n" * 100_000
    turns = [0]
    done = threading.Event()

    def spin() -> None:
        while not done.wait(0.0005):
            turns[0] += 1

    encoder = bytelevel._encoders.first
    expected = encoder.encode(text, add_special_tokens=False).ids
    thread = threading.Thread(target=spin)
    thread.start()
    try:
        got = bytelevel.encode(text)
    finally:
        done.set()
        thread.join()
    assert got == expected
    assert turns[0] > 20  # with the lock held throughout: none or a few
