"""Small trained tokenizers of the kinds that models come with, saved as `transformers` saves them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Encoder
from transformers import PreTrainedTokenizerFast

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
