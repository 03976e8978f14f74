"""Turns a GGUF file's vocabulary into encoders of the `tokenizers` package.

llama.cpp is the oracle: it reads the same fields (`tokenizer.ggml.*`), and golden ids taken from
it are compared in the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Never

from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Encoder

from agentserve.text.bytelevel import piece_bytes
from agentserve.text.errors import TextError
from agentserve.text.gguf_metadata import Metadata
from agentserve.text.pretokenizers import PreTokenizer, pretokenizer
from agentserve.text.vocabulary import ControlToken, Encoders, Vocabulary, is_control_text

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # token types of the format
_SPACE = "▁"
_NAMED = (
    ("bos_token", "bos"),
    ("eos_token", "eos"),
    ("unk_token", "unknown"),
    ("pad_token", "padding"),
    ("sep_token", "seperator"),  # the format's own spelling
)


# Files name one EOS; chat models also end on these (the list llama.cpp looks for, in short).
_ENDS = frozenset(
    {
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<end_of_turn>",
        "<｜end▁of▁sentence｜>",
    }
)


class _Fields:
    """Typed access to the metadata; a wrong type is a TextError that names the key."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def strings(self, key: str) -> list[str]:
        value = self._metadata.get(key)
        if not isinstance(value, list) or not value:
            raise TextError(f"GGUF metadata: {key} is missing or not a list")
        return [item if isinstance(item, str) else self._wrong(key) for item in value]

    def numbers(self, key: str, length: int, default: float) -> list[float]:
        value = self._metadata.get(key, [default] * length)
        if not isinstance(value, list) or len(value) != length:
            raise TextError(f"GGUF metadata: {key} must be a list of {length} numbers")
        return [item if isinstance(item, int | float) else self._wrong(key) for item in value]

    def text(self, key: str, default: str) -> str:
        value = self._metadata.get(key, default)
        return value if isinstance(value, str) else self._wrong(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(key, default)
        return value if isinstance(value, bool) else self._wrong(key)

    def token_id(self, key: str, size: int) -> int | None:
        value = self._metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            self._wrong(key)
        if not 0 <= value < size:
            raise TextError(f"GGUF metadata: {key} = {value} is outside the vocabulary of {size}")
        return value

    @staticmethod
    def _wrong(key: str) -> Never:
        raise TextError(f"GGUF metadata: {key} has the wrong type")


def vocabulary(metadata: Metadata) -> Vocabulary:
    """The vocabulary in `metadata`; raises TextError for kinds that are not supported."""
    fields = _Fields(metadata)
    kind = fields.text("tokenizer.ggml.model", "")
    if kind not in ("gpt2", "llama"):
        raise TextError(f"tokenizer.ggml.model {kind!r} is not supported (gpt2 and llama are)")
    tokens = fields.strings("tokenizer.ggml.tokens")
    types = [int(item) for item in fields.numbers("tokenizer.ggml.token_type", len(tokens), 1)]
    control_ids = {
        index
        for index, kind_of in enumerate(types)
        if kind_of in (_CONTROL, _UNKNOWN) or (kind_of == _USER_DEFINED and is_control_text(tokens[index]))
    }
    kept = [tokens[i] for i, kind_of in enumerate(types) if kind_of == _USER_DEFINED and i not in control_ids]
    bos = fields.token_id("tokenizer.ggml.bos_token_id", len(tokens))
    eos = fields.token_id("tokenizer.ggml.eos_token_id", len(tokens))
    if kind == "gpt2":
        rule = pretokenizer(fields.text("tokenizer.ggml.pre", "default"))
        encoders = _byte_level(tokens, control_ids, fields.strings("tokenizer.ggml.merges"), rule, kept)
        default_bos, strips = rule.add_bos, False
        pieces = [
            token.encode("utf-8") if types[i] in (_CONTROL, _UNKNOWN, _USER_DEFINED) else piece_bytes(token)
            for i, token in enumerate(tokens)
        ]
    else:
        scores = fields.numbers("tokenizer.ggml.scores", len(tokens), 0.0)
        strips = fields.flag("tokenizer.ggml.add_space_prefix", True)
        encoders = _sentencepiece(tokens, types, control_ids, scores, kept, prefix=strips)
        default_bos = True
        pieces = [_sentencepiece_bytes(token, types[i]) for i, token in enumerate(tokens)]
    add_bos = fields.flag("tokenizer.ggml.add_bos_token", default_bos)
    add_eos = fields.flag("tokenizer.ggml.add_eos_token", False)
    ends = {index for index in control_ids if types[index] == _CONTROL and tokens[index] in _ENDS}
    named_ends = (fields.token_id(f"tokenizer.ggml.{name}_token_id", len(tokens)) for name in ("eot", "eom"))
    named = {
        name: tokens[index]
        for name, key in _NAMED
        if (index := fields.token_id(f"tokenizer.ggml.{key}_token_id", len(tokens))) is not None
    }
    return Vocabulary(
        encoders=encoders,
        token_bytes=tuple(pieces),
        control=tuple(ControlToken(i, tokens[i], types[i] != _USER_DEFINED) for i in sorted(control_ids)),
        prefix_ids=(bos,) if add_bos and bos is not None else (),
        suffix_ids=(eos,) if add_eos and eos is not None else (),
        eos_ids=frozenset(index for index in (eos, *named_ends, *ends) if index is not None),
        strips_leading_space=strips,
        special_texts=named,
    )


def _byte_level(
    tokens: Sequence[str],
    control_ids: set[int],
    merges: Sequence[str],
    rule: PreTokenizer,
    kept: Sequence[str],
) -> Encoders:
    ids = {token: index for index, token in enumerate(tokens) if index not in control_ids}
    pairs: list[tuple[str, str]] = []
    for line in merges:
        left, _, right = line.partition(" ")
        if left in ids and right in ids and left + right in ids:  # a control token is never built
            pairs.append((left, right))
    encoder = Encoder(models.BPE(vocab=ids, merges=pairs, ignore_merges=rule.ignore_merges))
    if rule.nfc:
        encoder.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    encoder.pre_tokenizer = pre_tokenizers.Sequence(steps)
    encoder.add_tokens([AddedToken(text, normalized=False) for text in kept])
    return Encoders(encoder, encoder, encoder)


def _sentencepiece(
    tokens: Sequence[str],
    types: Sequence[int],
    control_ids: set[int],
    scores: Sequence[float],
    kept: Sequence[str],
    *,
    prefix: bool,
) -> Encoders:
    """SentencePiece BPE: the pair whose union scores best is joined first.

    `tokenizers` wants ranked pairs, so every way to cut a token into two tokens becomes a pair,
    ranked by the token's score.
    """
    unknown = next((i for i, kind in enumerate(types) if kind == _UNKNOWN), None)
    ids = {token: index for index, token in enumerate(tokens) if index not in control_ids}
    mergeable = {token: index for token, index in ids.items() if types[index] != _BYTE}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, index in mergeable.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in mergeable and right in mergeable:
                ranked.append((-scores[index], index, cut, left, right))
    ranked.sort()
    unknown_text = None
    if unknown is not None:
        unknown_text = " unknown"  # no text can spell it: spaces are replaced before
        ids[unknown_text] = unknown
    model = models.BPE(
        vocab=ids,
        merges=[(left, right) for _, _, _, left, right in ranked],
        byte_fallback=True,
        unk_token=unknown_text,
        fuse_unk=False,
    )

    def build(with_prefix: bool) -> Encoder:
        encoder = Encoder(model)
        replace = normalizers.Replace(" ", _SPACE)
        prepend = [normalizers.Prepend(_SPACE)] if with_prefix else []
        encoder.normalizer = normalizers.Sequence([*prepend, replace])
        encoder.add_tokens([AddedToken(text, normalized=False) for text in kept])
        return encoder

    joined = build(False)
    first = build(True) if prefix else joined
    return Encoders(first, first, joined)


def _sentencepiece_bytes(token: str, kind: int) -> bytes:
    if kind == _BYTE:
        try:
            return bytes([int(token[3:5], 16)]) if token.startswith("<0x") else token.encode("utf-8")
        except ValueError:
            raise TextError(f"GGUF metadata: byte token {token!r} is not of the form <0xNN>") from None
    if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED):
        return token.encode("utf-8")
    return token.replace(_SPACE, " ").encode("utf-8")
