"""Blocks that may go without a copy, because nobody is expected to come back to them."""

from __future__ import annotations

from agentserve.core.kv import KVManager
from agentserve.core.ledger import Known, Ledger
from agentserve.core.pages import DEVALUED


class Devaluation:
    """Owner of the marks `DEVALUED`. A block that somebody else is expected to use never has one."""

    def __init__(self, kv: KVManager, ledger: Ledger) -> None:
        self._kv = kv
        self._ledger = ledger

    def devalue(self, known: Known) -> None:
        """Nobody is expected back to the session."""
        known.devalued = True
        path = self._kv.matched(known.namespace, known.tokens, len(known.tokens))
        for index in range(len(path[0])):
            key = self._ledger.key(known, index)
            if not self._ledger.valued(key):
                self._kv.mark(key, tuple(group[index] for group in path), DEVALUED)

    def revalue(self, known: Known) -> None:
        """Somebody may want its blocks, whoever thought otherwise before."""
        known.devalued = False
        for key in known.keys:
            self._kv.unmark(key, DEVALUED)

    def value_again(self, known: Known) -> None:
        """What it shares with sessions that were given up is worth something again."""
        path = self._kv.matched(known.namespace, known.tokens, len(known.tokens))
        for key in self._ledger.keys(known, len(path[0])):
            self._kv.unmark(key, DEVALUED)
