"""How byte-level BPE vocabularies cut text into words, by the name in `tokenizer.ggml.pre`.

Each entry is the published pre-tokenizer of a model family: a list of patterns, each of which
isolates its matches in what the earlier ones left. Names that share patterns share an entry.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentserve.text.errors import TextError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Mistral's tekken and OpenAI's o200k: a word is upper-case letters, then lower-case ones.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_CASED}"
)
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?|\p{{N}}{{1,3}}|{_CASED}"
)

_CJK = "[一-龥ࠀ-一가-퟿]+"
# DeepSeek-LLM's letters are those with case: upper, lower and title case.
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    _CJK,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`patterns` in order; `ignore_merges`: a word that is a token whole is taken whole;
    `nfc`: text is NFC-normalised first; `add_bos`: whether the family begins with BOS when the
    file does not say."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    nfc: bool = False
    add_bos: bool = False


_FAMILIES: tuple[tuple[tuple[str, ...], PreTokenizer], ...] = (
    (("default",), PreTokenizer(_DEFAULT)),
    (
        ("gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "trillion", "roberta-bpe", "granite-docling"),
        PreTokenizer((_GPT2,)),
    ),
    (
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    (
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral-llama"),
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    (("smaug-bpe", "smollm3", "dbrx"), PreTokenizer((_LLAMA3,))),
    (("glm4", "chatglm-bpe"), PreTokenizer((_LLAMA3,))),
    (
        ("qwen2", "deepseek-r1-qwen", "megrez", "hunyuan", "stablelm2"),
        PreTokenizer((_QWEN2,), nfc=True),
    ),
    (("qwen35",), PreTokenizer((_QWEN35,))),
    (("tekken", "pixtral"), PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True)),
    (("gpt-4o", "llama4", "o200k"), PreTokenizer((_O200K,))),
    (("deepseek-llm",), PreTokenizer(_DEEPSEEK_LLM)),
    (("deepseek-coder",), PreTokenizer(_DEEPSEEK_CODER)),
    (("deepseek-v3", "hunyuan-dense"), PreTokenizer(_DEEPSEEK3)),
    (("falcon",), PreTokenizer(_FALCON)),
)
PRETOKENIZERS = {name: rule for names, rule in _FAMILIES for name in names}


def pretokenizer(name: str) -> PreTokenizer:
    """The rule called `name`; an unknown one is a TextError, for a guess would mis-tokenise silently."""
    try:
        return PRETOKENIZERS[name]
    except KeyError:
        raise TextError(f"unknown pre-tokenizer {name!r} (tokenizer.ggml.pre)") from None
