"""What server and workers must agree on about a model's tokens, or grammars would not fit.

A compiled grammar names the vocabulary it was compiled for (`tools_bridge.vocabulary`); both
sides build that vocabulary from this function and `TextModel.end_ids`.
"""

from __future__ import annotations

from agentserve.server.text_port import Tokenizer


def shown_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """What each token adds to the text a client sees: nothing for control tokens that are not shown."""
    shown = list(tokenizer.token_bytes)
    for token in tokenizer.control.values():
        fold = tokenizer.detokenizer()
        if not fold.push(token) + fold.flush():
            shown[token] = b""
    return shown
