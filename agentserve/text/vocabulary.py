"""What a tokenizer file says, in one form for both sources (GGUF and Hugging Face)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenizers import Tokenizer as Encoder

_MARKUP = re.compile(r"[<\[{(].*[>\]})]", re.DOTALL)
# Gemma gives ordinary HTML its own tokens; nothing in a template is forged by writing <b>. Its </s>
# stays control: it ends texts in other families, and llama.cpp ends generation on it.
_HTML = re.compile(
    r"</?(?:table|caption|thead|tbody|tfoot|tr|th|td|h[1-6]|blockquote|strong|em|b|i|u|sub|sup|code|a|html"
    r"|body|img|span|bbox|ul|ol|li|div|iframe|footer|p|br|hr|pre)>|<s>"
)


@dataclass(frozen=True, slots=True)
class ControlToken:
    """A token that only a template may write.

    `special`: it has no text of its own, so decoding drops it; the others (`<tool_call>`, `<think>`)
    are shown. `lstrip` / `rstrip`: the white space on that side belongs to it and is dropped;
    `single_word`: no match beside a word character.
    """

    id: int
    text: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


@dataclass(frozen=True, slots=True)
class Encoders:
    """The same vocabulary three times, without its control tokens; they differ in the prefix space.

    SentencePiece vocabularies put a space before a text's first word. Whether a run of text gets
    one depends on what is before it. Byte-level vocabularies use one encoder for all.
    """

    first: Encoder  # at the start of a text
    after_control: Encoder  # behind a control token
    joined: Encoder  # behind other text that has been encoded already: never a prefix space


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`token_bytes[id]` is what a token stands for (b"" where an id is not used).

    `prefix_ids` and `suffix_ids` frame a plain prompt (BOS, EOS). `special_texts` are the named
    tokens templates may use ("bos_token", "eos_token", ...).
    """

    encoders: Encoders
    token_bytes: tuple[bytes, ...]
    control: tuple[ControlToken, ...]
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    eos_ids: frozenset[int] = frozenset()
    strips_leading_space: bool = False
    special_texts: Mapping[str, str] = field(default_factory=dict)


def is_control_text(text: str) -> bool:
    """Whether an added token that is not marked special must still be kept from users.

    `<tool_call>`, `[TOOL_CALLS]`, `<think>` carry meaning for the template; runs of white space,
    HTML and odd letters that some vocabularies add are ordinary text.
    """
    core = text.strip().strip("▁")
    return bool(_MARKUP.fullmatch(core)) and not _HTML.fullmatch(core)
