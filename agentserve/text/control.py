"""Finds control tokens in text: those a template wrote, and those a user would like to write."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from agentserve.text.vocabulary import ControlToken

_NOTHING = re.compile(r"(?!)")
_Trie = dict[str, "_Trie"]


def any_of(texts: Sequence[str]) -> re.Pattern[str]:
    """A pattern for the longest of `texts` at a place. Built as a trie: a vocabulary may have 6,000."""
    root: _Trie = {}
    for text in texts:
        node = root
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_source(root)) if root else _NOTHING


def _source(node: _Trie) -> str:
    """The node's pattern. Chains without a branch stay flat, so nesting follows branches alone."""
    prefix = ""
    while len(node) == 1:
        (character, node) = next(iter(node.items()))
        if not character:
            return prefix
        prefix += re.escape(character)
    branches = [re.escape(key) + _source(child) for key, child in node.items() if key]
    optional = "?" if "" in node else ""
    return f"{prefix}(?:{'|'.join(branches)}){optional}"


class ControlMatcher:
    """All control tokens of one vocabulary."""

    def __init__(self, tokens: Sequence[ControlToken]) -> None:
        self._tokens = {token.text: token for token in tokens if token.text}
        texts = list(self._tokens)
        self.pattern = any_of(texts)
        # Half a control string at the edge of a user's string could be completed by what the
        # template writes beside it.
        self._heads = frozenset(text[:cut] for text in texts for cut in range(1, len(text)))
        self._tails = frozenset(text[cut:] for text in texts for cut in range(1, len(text)))
        self._longest = max((len(text) for text in texts), default=0)

    def find(self, text: str) -> Iterator[tuple[int, int, ControlToken]]:
        """(start, end, token) of each control token in `text`, left to right, longest first."""
        for match in self.pattern.finditer(text):
            token = self._tokens[match.group()]
            if token.single_word and self._beside_word(text, match.start(), match.end()):
                continue
            yield match.start(), match.end(), token

    def partial_head(self, text: str) -> int:
        """Length of the longest end of `text` that begins a control string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-length:] in self._heads:
                return length
        return 0

    def partial_tail(self, text: str) -> int:
        """Length of the longest start of `text` that ends a control string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if text[:length] in self._tails:
                return length
        return 0

    @staticmethod
    def _beside_word(text: str, start: int, end: int) -> bool:
        before = text[start - 1] if start else " "
        after = text[end] if end < len(text) else " "
        return any(character.isalnum() or character == "_" for character in (before, after))
