"""The vocabulary as a grammar sees it: what each token adds to the text.

Server and worker each build one; a compiled grammar names the vocabulary it was compiled for,
because xgrammar's masks index a sorted vocabulary and would be silently wrong on another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xgrammar


class GrammarVocabulary:
    """A tokenizer's bytes, ready for grammars.

    `token_bytes[i]` is exactly what token `i` adds to the text a client sees. Tokens with no bytes
    (control tokens that are not shown, ids the tokenizer does not have) are never allowed by a
    grammar. `vocab_size` is the width of the logits, at least len(token_bytes). `stop_token_ids`
    end a grammar's text; at least one.
    """

    def __init__(self, token_bytes: Sequence[bytes], vocab_size: int, stop_token_ids: Sequence[int]) -> None:
        if not stop_token_ids:
            raise ValueError("a grammar needs at least one stop token id to end with")
        if len(token_bytes) > vocab_size:
            raise ValueError(f"{len(token_bytes)} tokens do not fit into a vocabulary of {vocab_size}")
        for token in stop_token_ids:
            if not 0 <= token < vocab_size:
                raise ValueError(f"stop token id {token} is outside the vocabulary of {vocab_size}")
        import xgrammar  # here, not above: it imports torch

        padding = [b""] * (vocab_size - len(token_bytes))
        stops = sorted(set(stop_token_ids))
        self.vocab_size = vocab_size
        self.info: xgrammar.TokenizerInfo = xgrammar.TokenizerInfo(
            [*token_bytes, *padding],
            xgrammar.VocabType.RAW,
            vocab_size=vocab_size,
            stop_token_ids=stops,
        )
        self._seal = self._digest(token_bytes, vocab_size, stops) + "\n"

    @staticmethod
    def _digest(token_bytes: Sequence[bytes], vocab_size: int, stops: Sequence[int]) -> str:
        digest = hashlib.sha256(f"{vocab_size} {list(stops)}".encode())
        for data in token_bytes:
            digest.update(len(data).to_bytes(4, "little"))
            digest.update(data)
        return digest.hexdigest()[:32]

    def seal(self, grammar: xgrammar.CompiledGrammar) -> str:
        """A compiled grammar as text: a line that names the vocabulary, then xgrammar's JSON."""
        return self._seal + grammar.serialize_json()

    def unseal(self, compiled: str) -> xgrammar.CompiledGrammar:
        """The inverse of `seal`; another vocabulary or a broken text is a ValueError."""
        import xgrammar

        if not compiled.startswith(self._seal):
            raise ValueError("the grammar was compiled for another vocabulary, or is no compiled grammar")
        try:
            return xgrammar.CompiledGrammar.deserialize_json(compiled[len(self._seal) :], self.info)
        except RuntimeError as error:
            raise ValueError(f"the compiled grammar cannot be read: {str(error).strip()[:200]}") from error
