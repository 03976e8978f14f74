"""Prefill ahead: the beginning of a waiting session's next prompt, computed while its tool still talks.

As a tool's output arrives, `expect` says how far a session's next prompt is certain by now. A chunk of
that is computed in what a step leaves over: of its tokens (a page of them, where turns run) and its
predicted time, and of pages that can go without loss (where there are no tiers, those used least
recently). In a step after which somebody waits nothing is. A chunk holds pages while its step runs; then
they are idle KV in the tree like any other, the partly filled one as a tail, and the next turn simply
matches them. It samples nothing, and if the prompt comes out otherwise its KV is a plain miss.

What one session can have computed before its next turn is bounded by the context, whatever it is sent.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import islice

from agentserve.core.config import CoreConfig
from agentserve.core.draft import Draft
from agentserve.core.kv import KVManager
from agentserve.core.pages import DEVALUED
from agentserve.core.plan import Chunk, ChunkResult
from agentserve.core.radix import common_prefix
from agentserve.core.scheduler import Scheduler
from agentserve.core.session import Session
from agentserve.core.tiers import Tiers
from agentserve.core.timing.tally import Wanted
from agentserve.messages import AheadCounts
from agentserve.types import SessionId

SHARE = 4  # at most one in so many of a step's tokens: a turn that arrives meanwhile waits for no more
# In a step with turns it is a page: a decode step is short, and a share of its tokens would take many times
# as long, again and again, as long as tools talk.
EXAMINED = 4  # sessions looked at per step, each in its turn
IDLE_EXAMINED = 64  # where nothing else runs: no step comes soon that would look at the next ones


@dataclass(slots=True, eq=False)
class Expected:
    """What is known of a session's next prompt, and what was computed of it."""

    session: Session
    left: int  # tokens that may still be computed before its next turn
    tokens: array[int] = field(default_factory=lambda: array("i"))
    ran: bytearray = field(default_factory=bytearray)  # positions of `tokens` that were computed ahead: 1
    flying: tuple[array[int], int, int] | None = None  # in the step that runs: tokens, start, end of a chunk


class Ahead:
    def __init__(
        self,
        config: CoreConfig,
        kv: KVManager,
        scheduler: Scheduler,
        tiers: Tiers | None,
        limit: int,
    ) -> None:
        """limit: tokens that a session may have; a prompt of so many is refused, and not computed ahead."""
        self._config = config
        self._kv = kv
        self._scheduler = scheduler
        self._tiers = tiers
        self._limit = limit
        self._share = max(config.page_size, config.max_batched_tokens // SHARE)
        self._expected: dict[SessionId, Expected] = {}
        self._open: dict[SessionId, Expected] = {}  # those that lack KV, in the order of their turns
        self._aside: dict[SessionId, Expected] = {}  # those whose KV lies below: until transfers end, or news
        self._claims: dict[SessionId, bytearray] = {}  # of turns not admitted yet: what was computed for them
        self._computed = 0
        self._used = 0

    @property
    def counts(self) -> AheadCounts:
        return AheadCounts(self._computed, self._used)

    # --- what happens to sessions ----------------------------------------------------------

    def expect(self, session: Session, tokens: array[int]) -> None:
        """The next prompt of `session`, at rest, begins with `tokens`, as far as is known by now."""
        if not self._config.prefix_cache:
            return  # there is no tree to leave it in
        if len(tokens) >= self._limit:
            self.stop(session.id)
            return
        expected = self._expected.get(session.id)
        if expected is None:
            expected = self._expected[session.id] = Expected(session, self._limit)
        same = common_prefix(expected.tokens, tokens)
        expected.ran = expected.ran[:same].ljust(len(tokens), b"\0")
        expected.tokens = tokens
        if expected.left:
            self._aside.pop(session.id, None)
            self._open[session.id] = expected

    def moved(self) -> None:
        """What lay below may have been brought, or be gone: who stood aside for it is looked at again."""
        self._open |= self._aside
        self._aside.clear()

    def stop(self, name: SessionId) -> None:
        """Compute no more of it, unless there is news. What was computed stays as long as it does."""
        self._open.pop(name, None)
        self._aside.pop(name, None)
        expected = self._expected.get(name)
        if expected is not None and expected.flying is not None:
            expected.flying = None
            self._kv.release(name)

    def forget(self, name: SessionId) -> None:
        """It waits no more, or its turn is over."""
        self.stop(name)
        self._expected.pop(name, None)
        self._claims.pop(name, None)

    def submitted(self, session: Session) -> None:
        """Its next turn is here: from now on its KV is the scheduler's business."""
        expected = self._expected.get(session.id)
        self.forget(session.id)
        if expected is not None and any(expected.ran):
            self._claims[session.id] = expected.ran[: common_prefix(expected.tokens, session.tokens)]

    def admitted(self, session: Session, hit: int) -> None:
        """The turn begins, `hit` tokens of it with KV."""
        ran = self._claims.pop(session.id, None)
        if ran is not None:
            self._used += ran.count(1, 0, hit)

    # --- a step ----------------------------------------------------------------------------

    @property
    def wants(self) -> bool:
        """Whether anything could be computed ahead."""
        return bool(self._open)

    def fill(self, draft: Draft) -> None:
        """Add a chunk to a plan that is otherwise done, from what it leaves over."""
        most = min(draft.tokens, self._config.page_size if draft.chunks else self._share)
        if most < 1 or len(draft.chunks) >= self._config.max_num_seqs or self._room < 1:
            return
        for name in list(islice(self._open, EXAMINED if draft.chunks else IDLE_EXAMINED)):
            expected = self._open.pop(name)
            self._open[name] = expected  # the others come first the next time
            if self._grant(expected, draft, most):
                return

    def _grant(self, expected: Expected, draft: Draft, most: int) -> bool:
        """A chunk of at most `most` tokens, if there is room for one."""
        kv, session, tokens = self._kv, expected.session, expected.tokens
        cached = kv.cached_tokens(session.namespace, tokens)
        if cached >= len(tokens):
            del self._open[session.id]
            return False
        if self._tiers is not None and self._tiers.restores.lies_below(session.id, cached // kv.page_size):
            self._aside[session.id] = self._open.pop(session.id)
            return False  # to bring it is for the policy to decide, and costs less than this
        start = kv.begin(session.id, session.namespace, tokens)
        count = self._chunk_size(expected, start, draft, most)
        end = start + count
        copies = kv.reserve(session.id, start, end) if count else None
        if copies is None:
            kv.release(session.id)
            return False
        draft.copies.extend(copies)
        draft.tally.copy(copies)
        table = kv.table(session.id)
        chunk = Chunk(session.id, session.last_turn, session.epoch, start, tokens[start:end], table, None)
        draft.chunks.append(chunk)
        draft.tokens -= count
        draft.tally.chunk(start, count, None)
        expected.flying = tokens, start, end
        expected.left -= count
        if not expected.left:
            del self._open[session.id]
        return True

    @property
    def _room(self) -> int:
        """Blocks to be had that nobody misses. Without tiers those used least recently are missed least:
        this session's own are wanted sooner."""
        if self._tiers is not None:
            return self._tiers.room_without_loss
        return self._kv.available - self._scheduler.spoken_for

    def _chunk_size(self, expected: Expected, start: int, draft: Draft, most: int) -> int:
        """Tokens of the next chunk, from `start` on; what its session holds is held. A chunk that is not
        the last ends on a page edge."""
        size, lag = self._config.page_size, len(expected.tokens) - start
        room = (self._kv.blocks_of(expected.session.id) + max(self._room, 0)) * size - start
        count = max(min(lag, most, room, expected.left), 0)
        if draft.seconds is not None:
            wanted = Wanted(start, count, count + 1)  # whose next token nobody picks
            cost = self._scheduler.cost
            tally = draft.tally.with_copies() if cost.minds_copies else draft.tally
            count = cost.largest(tally, wanted, draft.seconds)
        if count < lag:
            count = max((start + count) // size * size - start, 0)
        return count

    def finished(self, result: ChunkResult) -> bool:
        """Whether a chunk of the step that has run was one of these; if so it is booked."""
        expected = self._expected.get(result.session)
        if expected is None or expected.flying is None:
            return False
        (tokens, start, end), expected.flying = expected.flying, None
        name, namespace = result.session, expected.session.namespace
        if result.error:
            self._give_up(expected)
            return True
        self._kv.park(name, tokens, end)
        self._computed += end - start
        same = min(common_prefix(tokens, expected.tokens), end)
        if same > start:
            expected.ran[start:same] = b"\1" * (same - start)
        if self._tiers is not None:
            self._devalue(self._tiers, namespace, tokens, start, end)
        return True

    def failed(self) -> set[SessionId]:
        """A step was not run to its end: give up what it had of these, and say whose that was."""
        flying = {name for name, expected in self._expected.items() if expected.flying is not None}
        for name in flying:
            self._expected[name].flying = None
            self._give_up(self._expected[name])
        return flying

    def _give_up(self, expected: Expected) -> None:
        """What fails once is left to the turn, which says so."""
        expected.left = 0
        self._open.pop(expected.session.id, None)
        self._kv.release(expected.session.id)

    def _devalue(self, tiers: Tiers, namespace: bytes, tokens: array[int], start: int, end: int) -> None:
        """Blocks that no session has yet may go without loss, until a turn asks for them."""
        kv = self._kv
        path = kv.matched(namespace, tokens, end)
        for index in range(start // kv.page_size, len(path[0])):
            node = kv.tree.node_of(path[0][index])
            key = node.keys[index - node.start]
            if not tiers.ledger.valued(key):
                kv.mark(key, tuple(group[index] for group in path), DEVALUED)

    # --- checking --------------------------------------------------------------------------

    def flying(self, name: SessionId) -> bool:
        """Whether the step that runs now has a chunk of it."""
        expected = self._expected.get(name)
        return expected is not None and expected.flying is not None

    @property
    def any_flying(self) -> bool:
        return any(expected.flying is not None for expected in self._expected.values())

    def check(self) -> None:
        """Raise AssertionError if the books do not agree (INV-44)."""
        for name, expected in self._expected.items():
            assert expected.session.turn is None, f"{name}: computed ahead while its turn runs"
            assert len(expected.ran) == len(expected.tokens) < self._limit, f"{name}: expected too long"
            assert 0 <= expected.left <= self._limit, f"{name}: more was computed ahead than may be"
        assert not self._open.keys() & self._aside.keys(), "both in turn and aside"
        for name, expected in (self._open | self._aside).items():
            assert self._expected.get(name) is expected, f"{name}: wanted, but not expected"
        assert 0 <= self._used <= self._computed, "more was used than computed"
