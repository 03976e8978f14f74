"""Blocks that may go without a copy, because nobody is expected to come back to them."""

from __future__ import annotations

from itertools import islice

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
        known.devalued, known.cleared = True, 0
        path = self._kv.matched(known.namespace, known.tokens, len(known.tokens))
        for index in range(len(path[0])):
            key = self._ledger.key(known, index)
            if not self._ledger.valued(key):
                self._kv.mark(key, tuple(group[index] for group in path), DEVALUED)

    def revalue(self, known: Known) -> None:
        """Somebody may want its blocks, whoever thought otherwise before."""
        known.devalued = False
        for key in islice(known.keys, known.cleared, None):  # those before are of worth: none was marked
            self._kv.unmark(key, DEVALUED)
        known.cleared = len(known.keys)

    def value_again(self, known: Known) -> None:
        """A turn is here: what it shares with sessions that were given up is worth something again, too."""
        path = self._kv.matched(known.namespace, known.tokens, len(known.tokens))
        self._ledger.keys(known, len(path[0]))
        self.revalue(known)

    def check(self) -> None:
        """Raise AssertionError if a block has a mark that somebody is expected to use."""
        for known in self._ledger.known.values():
            path = self._kv.matched(known.namespace, known.tokens, known.cleared * self._kv.page_size)
            marked = (self._kv.pools[0].marks(page) & DEVALUED for page in path[0])
            assert known.devalued or not any(marked), f"{known.id}: a block of worth is marked"
