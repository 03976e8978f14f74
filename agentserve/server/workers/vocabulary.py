"""What server and workers must agree on about a model's tokens, or grammars would not fit.

A compiled grammar names the vocabulary it was compiled for (`tools_bridge.vocabulary`); both
sides build that vocabulary from these two functions.
"""

from __future__ import annotations

from agentserve.server.text_port import Tokenizer
from agentserve.text import TextModel


def shown_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """What each token adds to the text a client sees: nothing for control tokens that are not shown."""
    shown = list(tokenizer.token_bytes)
    for token in tokenizer.control.values():
        fold = tokenizer.detokenizer()
        if not fold.push(token) + fold.flush():
            shown[token] = b""
    return shown


def end_ids(text: TextModel) -> tuple[int, ...]:
    """Every token that ends a text or a chat message, ascending."""
    turn_ends = text.template.stop_ids if text.template.available else ()
    return tuple(sorted({*text.tokenizer.eos_ids, *turn_ends}))
