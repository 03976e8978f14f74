"""Probes: asking what this machine's other workers have on disk, when a session comes that is new here.

Its worker may have died, been restarted, or forgotten; or others may have begun as it does. The answer
comes from the mover; until then its turn waits, for a fraction of what computing would take.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from agentserve.core.kv import KVManager
from agentserve.core.ledger import Known, Ledger
from agentserve.types import SessionId
from tiering.manager import TierManager
from tiering.policy.base import Prices
from tiering.types import Transfer

SHARE = 4  # a turn waits for an answer one part in so many of the time that computing would take
MOST_KEYS = 1024  # asked for at once


@dataclass(frozen=True, slots=True)
class Probe:
    session: SessionId
    number: int  # of its transfer
    deadline: float


class Probes:
    def __init__(self, kv: KVManager, manager: TierManager, ledger: Ledger) -> None:
        self._kv = kv
        self._manager = manager
        self._ledger = ledger
        self._probes: dict[SessionId, Probe] = {}
        self._numbers: dict[int, SessionId] = {}  # by transfer: who waits for it
        self._asked: dict[SessionId, float] = {}  # when, of sessions that wait for admission

    def ask(self, known: Known, prices: Prices, now: float) -> None:
        """Ask for the blocks of its prompt that are nowhere here, if there are any."""
        kv, size = self._kv, self._kv.page_size
        limit = (len(known.tokens) - 1) // size
        at = len(kv.matched(known.namespace, known.tokens, len(known.tokens) - 1)[0])
        keys = self._ledger.keys(known, limit)
        at += len(self._manager.run(islice(keys, at, limit)))
        limit = min(limit, at + MOST_KEYS)
        if at >= limit:
            return
        self.dismiss(known.id)
        patience = prices.recompute(at * size, (limit - at) * size) / SHARE
        number = self._manager.probe(keys[at:limit]).id
        self._numbers[number] = known.id
        self._probes[known.id] = Probe(known.id, number, now + patience)
        self._asked[known.id] = now

    def waited(self, session: SessionId, now: float) -> float:
        """Seconds since it was asked for the turn that waits; 0 if it was not."""
        return now - self._asked.get(session, now)

    def holds_up(self, session: SessionId, now: float) -> bool:
        """Does its turn wait for an answer?"""
        self.expire(now)
        return session in self._probes

    def expire(self, now: float) -> None:
        """End waits that have lasted too long. An answer that comes later is of use to others."""
        for probe in [probe for probe in self._probes.values() if probe.deadline <= now]:
            self._end(probe.session)

    @property
    def next_deadline(self) -> float | None:
        return min((probe.deadline for probe in self._probes.values()), default=None)

    def dismiss(self, session: SessionId) -> None:
        """Its turn waits no more, whatever for."""
        self._asked.pop(session, None)
        probe = self._end(session)
        if probe is not None:
            self._manager.flights.recall(probe.number)

    def finished(self, transfer: Transfer) -> None:
        """One has been answered; what was found the manager knows."""
        session = self._numbers.get(transfer.id)
        if session is not None:
            self._end(session)

    def _end(self, session: SessionId) -> Probe | None:
        """Nobody waits for its answer any more."""
        probe = self._probes.pop(session, None)
        if probe is not None:
            del self._numbers[probe.number]
        return probe
