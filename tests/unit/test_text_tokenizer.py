"""Hugging Face tokenizers against `transformers`, and the wall between text and control tokens."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Encoder
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agentserve.text import TextError, Tokenizer, hf_vocab, load
from tests.text_models import save_model, source

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello world, hello there! Is it 21 degrees in Zürich?",
    "def main(values): return sum(value for value in values) if values else None",
    "I'm sure that you're right; they've said it'll work. naïve café Straße Привет мир 你好世界",
    '{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}} system user assistant tool',
] * 3
CONTROLS = ["<|start|>", "<|end|>", "<s>", "</s>", "<unk>"]
MARKUP = ["<tool_call>", "</tool_call>", "<think>"]  # not special, yet not for users


def byte_level() -> Encoder:
    encoder = Encoder(models.BPE())
    encoder.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"), "isolated")
    encoder.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    encoder.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    encoder.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    return encoder


def sentencepiece_decoder() -> decoders.Decoder:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(steps)


def byte_tokens() -> list[str]:
    return ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]


def with_byte_fallback(encoder: Encoder) -> Encoder:
    """A trained BPE with SentencePiece's byte tokens in front."""
    definition = json.loads(encoder.to_str())
    model = definition["model"]
    learned = sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokens = byte_tokens() + [token for token in learned if token not in byte_tokens()]
    model |= {"vocab": {token: index for index, token in enumerate(tokens)}}
    model |= {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    return Encoder.from_str(json.dumps(definition))


def metaspace_first() -> Encoder:
    encoder = Encoder(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    encoder.train_from_iterator(
        [word for line in CORPUS for word in line.split()],
        trainers.BpeTrainer(vocab_size=300, show_progress=False),
    )
    encoder = with_byte_fallback(encoder)
    encoder.decoder = sentencepiece_decoder()
    return encoder


def prepend_always() -> Encoder:
    encoder = metaspace_first()
    encoder.pre_tokenizer = None  # type: ignore[assignment]
    encoder.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return encoder


def unigram() -> Encoder:
    encoder = Encoder(models.Unigram())
    encoder.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    encoder.decoder = decoders.Metaspace(prepend_scheme="always")
    encoder.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=260,
            special_tokens=["<unk>", "<s>", "</s>"],
            unk_token="<unk>",
            show_progress=False,
        ),
    )
    return encoder


KINDS: dict[str, Callable[[], Encoder]] = {
    "byte_level": byte_level,
    "metaspace_first": metaspace_first,
    "prepend_always": prepend_always,
    "unigram": unigram,
}


def save(encoder: Encoder, folder: Path, **config: object) -> Path:
    encoder.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROLS])
    encoder.add_tokens([AddedToken(text, normalized=False) for text in MARKUP])
    bos = encoder.token_to_id("<s>")
    encoder.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", bos)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=encoder, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    if config:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


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
