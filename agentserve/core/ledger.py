"""The ledger: which sessions share a block, and what the block is worth because of them.

A session keeps the keys of its full blocks, made as they are asked for. A block is worth its best
sharer; one that a waiting turn is about to read is worth more than any other.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

from agentserve.core.radix import common_prefix
from agentserve.core.session import NO_TURN
from agentserve.messages import Decided, pack_tokens
from agentserve.types import SessionId, TurnId
from tiering.copies import Losers, Standing
from tiering.keys import block_key
from tiering.policy.base import Choice, Decision, Hints, Park, Residency, Rest
from tiering.retention import Runs, runs_of, weight_at
from tiering.types import Tier

NO_HINTS = Hints()
NOWHERE = Residency(0, 0, 0, 0)
MOST_DECISIONS = 16  # kept per session, for operators
MANY = 16  # sharers of a block that a tuple is good for: more come and go in a dict


class Stage(Enum):
    RESTING = auto()
    WAITING = auto()  # for admission: its blocks are wanted next
    RUNNING = auto()  # it holds its blocks on the device; copies below are a reserve


@dataclass(slots=True, eq=False)
class Known:
    """A session as the tiers see it."""

    id: SessionId
    program: float  # when its first turn arrived
    namespace: bytes = b""
    tenant: str = ""
    tokens: array[int] = field(default_factory=lambda: array("i"))
    keys: list[bytes] = field(default_factory=list)  # of its leading full blocks, as far as asked for
    stage: Stage = Stage.RESTING
    since: float = 0.0  # when it came to its stage
    place: float = math.inf  # in the line of waiting turns, as it was last seen
    rest: Rest = Rest.IDLE
    turn: TurnId = NO_TURN
    tools: tuple[str, ...] = ()
    hints: Hints = NO_HINTS
    runs: Runs = ()  # what its blocks weigh beside each other, if its client said
    leaves: bool = False  # preempted, to be moved out: what has a copy below goes first
    told: bool = False  # the policy knows that it is at rest
    devalued: bool = False
    cleared: int = 0  # leading keys that bear no mark of lost worth, as long as it is of worth
    service: float = 0.0  # seconds of steps that it took part in
    decision: Decision | None = None
    residency: Residency = NOWHERE
    measured: float = -math.inf  # when the residency was taken
    timer: int = 0  # number of the timer that counts
    untold: int = 0  # decisions that were left out since one was told as news
    decisions: deque[Decided] = field(default_factory=lambda: deque(maxlen=MOST_DECISIONS))

    def decided(self, decision: Decision, at: float) -> bool:
        """Keep what was chosen; that the same is chosen again for the same reason is no news (False)."""
        last, self.decision = self.decisions[-1] if self.decisions else None, decision
        choice = decision.choice.value
        if last and (last.choice, last.reason) == (choice, decision.reason) and last.at >= self.since:
            return False
        self.decisions.append(Decided(at, choice, decision.reason, decision.price, self.residency))
        return True

    def weight(self, index: int) -> float:
        """What its block `index` weighs beside its others."""
        return weight_at(self.runs, index)

    def parts(self) -> Iterator[tuple[int, int, float]]:
        """(start, end, weight) of runs of its keys that weigh alike, in order."""
        start, count = 0, len(self.keys)
        for end, weight in self.runs[:-1]:
            yield start, min(end, count), weight
            start = end
        yield start, count, self.runs[-1][1] if self.runs else 1.0

    @property
    def keep(self) -> bool:
        """The last decision wants its blocks on the device."""
        return self.decision is not None and self.decision.choice in (Choice.HOLD, Choice.RESTORE)


# (standing, number of its session, -start, end, session) of a run of blocks that weigh alike
Ranked = tuple[Standing, int, int, int, Known]


class Ledger:
    """Keys and their sharers. `worth` says what a block of a session at rest is worth in a tier."""

    def __init__(self, page_size: int, worth: Callable[[Known, Tier], float]) -> None:
        self.known: dict[SessionId, Known] = {}
        self.orphaned: list[bytes] = []  # keys that lost their last sharer; emptied by the reader
        self.adopted: list[bytes] = []  # keys that got their first; emptied by the reader
        self._size = page_size
        self._worth = worth
        # In the order in which they came. Most blocks have one, a system prompt's have thousands.
        self._sharers: dict[bytes, tuple[SessionId, ...] | dict[SessionId, None]] = {}

    def open(self, session: SessionId, now: float) -> Known:
        found = self.known.get(session)
        if found is None:
            found = self.known[session] = Known(session, now, since=now)
        return found

    def forget(self, session: SessionId) -> None:
        known = self.known.pop(session, None)
        if known is not None:
            self._disown(known, 0)

    def rename(self, known: Known, namespace: bytes, tokens: array[int]) -> None:
        """The session has these tokens now. Keys of leading blocks that it had already stay."""
        keep = 0
        if namespace == known.namespace:
            keep = common_prefix(known.tokens, tokens) // self._size
        self._disown(known, keep)
        known.namespace, known.tokens = namespace, tokens
        self.hinted(known, known.hints)

    def hinted(self, known: Known, hints: Hints) -> None:
        """Its client says this of it."""
        known.hints = hints
        known.runs = runs_of(hints.retain, len(known.tokens) // self._size, self._size)

    def key(self, known: Known, index: int) -> bytes:
        """The key of its full block `index`; the session shares it from now on."""
        return self.keys(known, index + 1)[index]

    def keys(self, known: Known, count: int) -> list[bytes]:
        """Its keys, at least the first `count`. Not to be changed."""
        size, keys = self._size, known.keys
        for at in range(len(keys), count):
            parent = keys[-1] if at else known.namespace
            key = block_key(parent, pack_tokens(known.tokens[at * size : (at + 1) * size]))
            keys.append(key)
            self._own(key, known.id)
        return keys

    def _own(self, key: bytes, session: SessionId) -> None:
        before = self._sharers.get(key, ())
        if not before:
            self.adopted.append(key)
        if isinstance(before, dict):
            before[session] = None
        elif len(before) < MANY:
            self._sharers[key] = (*before, session)
        else:
            self._sharers[key] = dict.fromkeys((*before, session))

    def _disown(self, known: Known, keep: int) -> None:
        for key in known.keys[keep:]:
            sharers = self._sharers[key]
            if isinstance(sharers, dict):
                del sharers[known.id]
            else:
                sharers = self._sharers[key] = tuple(sharer for sharer in sharers if sharer != known.id)
            if not sharers:
                del self._sharers[key]
                self.orphaned.append(key)
        del known.keys[keep:]
        known.cleared = min(known.cleared, keep)

    # --- worth -----------------------------------------------------------------------------

    def owned(self, key: bytes) -> bool:
        return key in self._sharers

    def sharers(self, key: bytes) -> tuple[SessionId, ...]:
        return tuple(self._sharers.get(key, ()))

    def valued(self, key: bytes) -> bool:
        """Does anybody share the block who is expected back?"""
        return any(not self.known[sharer].devalued for sharer in self._sharers.get(key, ()))

    def wanted(self, key: bytes) -> float | None:
        """The place in line of the first waiting turn that is about to read the block; None if none is."""
        sharers = (self.known[sharer] for sharer in self._sharers.get(key, ()))
        return min(
            (
                known.place
                for known in sharers
                if known.stage is Stage.WAITING and not known.devalued and not known.leaves
            ),
            default=None,
        )

    def kept(self, key: bytes) -> bool:
        """Is the block to be on the device, as far as it can: a sharer is held there or was brought back?"""
        sharers = (self.known[sharer] for sharer in self._sharers.get(key, ()))
        return any(known.told and known.keep and not known.devalued for known in sharers)

    def standing(self, known: Known, tier: Tier) -> Standing:
        if known.devalued or (known.stage is Stage.RUNNING and tier is not Tier.DISK):
            return 0.0, known.since  # the device has it; to write it again would take the disk's time
        if known.stage is Stage.WAITING:
            return math.inf, -known.place  # who is last in line is served last
        return self._worth(known, tier), known.since

    def standing_of(self, known: Known, index: int, tier: Tier) -> Standing:
        """Of its block `index`: as the session's, or less where its client wants others of them more."""
        standing = self.standing(known, tier)
        return _weighed(standing, known.weight(index)) if known.runs else standing

    def best(self, key: bytes, index: int, tier: Tier) -> float:
        """What the block, at place `index`, is worth: what it is to its best sharer; 0 if it has none."""
        worth = 0.0
        for sharer in reversed(self._sharers.get(key, ())):
            worth = max(worth, self.standing_of(self.known[sharer], index, tier)[0])
            if worth == math.inf:
                break  # of thousands of forks the latest has just begun to rest: the others need no price
        return worth

    def losers(self, tier: Tier) -> Losers:
        """Blocks in the order in which they go: the least worth session's first, tail before head, each
        after its last sharer's turn has come. A session with runs of several weights has a turn for each."""
        ranked: list[Ranked] = []
        for number, known in enumerate(self.known.values()):
            standing = self.standing(known, tier)
            for start, end, weight in known.parts():
                ranked.append((_weighed(standing, weight), number, -start, end, known))
        ranked.sort(key=lambda entry: entry[:3])
        return partial(self._going, ranked)

    def _going(self, ranked: Sequence[Ranked], below: Standing) -> Iterator[bytes]:
        seen: dict[bytes, int] = {}
        for standing, _, tailward, end, known in ranked:
            if standing >= below:
                return
            for key in reversed(known.keys[-tailward:end]):
                sharers = len(self._sharers[key])
                if sharers > 1:
                    seen[key] = seen.get(key, 0) + 1
                    if seen[key] < sharers:
                        continue
                yield key

    def park_of(self, known: Known, cached: int) -> Park:
        """What a policy is told of it when it comes to rest. cached: tokens that have KV now."""
        blocks = len(known.tokens) // self._size
        self.keys(known, blocks)
        return Park(
            known.id,
            known.since,
            known.rest,
            known.turn,
            known.tools,
            cached,
            blocks,
            self.private(known),
            known.program,
            known.service,
            known.hints,
            known.tenant,
        )

    def private(self, known: Known) -> int:
        """Its blocks that no other known session shares."""
        return sum(len(self._sharers[key]) == 1 for key in known.keys)

    def check(self) -> None:
        """Raise AssertionError if the books do not agree."""
        sharers: dict[bytes, set[SessionId]] = {}
        for known in self.known.values():
            for key in known.keys:
                sharers.setdefault(key, set()).add(known.id)
        assert {key: set(ids) for key, ids in self._sharers.items()} == sharers, "sharers differ"


def _weighed(standing: Standing, weight: float) -> Standing:
    """Never more than it was; what is wanted at once stays so."""
    worth, since = standing
    return (worth * weight, since) if 0 < worth < math.inf else standing
