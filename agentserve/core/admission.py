"""Admission: which waiting turns enter a step, in the order that the policy gives, and why others do not.

Nobody passes a turn that lacks room, only one that waits for KV that is on its way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from agentserve.core.config import CoreConfig
from agentserve.core.draft import Draft, Gate
from agentserve.core.grants import Grants
from agentserve.core.kv import KVManager
from agentserve.core.radix import common_prefix
from agentserve.core.scheduling.policy import Reserve, SchedulingPolicy
from agentserve.core.session import Session, SessionTable

WAITING_EXAMINED = 64  # waiting sessions looked at per step: the rest stand behind them in order
TOLD_EVERY = 16  # lines of which the tiers hear, where it is long
PASSED = ("prefix", "loading")  # it waits for KV that is on its way: others may pass


@dataclass(frozen=True, slots=True)
class Place:
    """A waiting turn in line."""

    session: Session
    limit: str  # what keeps it from entering; empty: nothing does
    lacking: int = 0  # tokens that it needs, where short turns go first; else nobody asked
    short: bool = False  # it is one


class Admission:
    """The line of turns that wait, and the gate that they pass. What runs is told with every question."""

    def __init__(
        self,
        config: CoreConfig,
        sessions: SessionTable,
        kv: KVManager,
        grants: Grants,
        policy: SchedulingPolicy,
    ) -> None:
        self._config = config
        self._sessions = sessions
        self._kv = kv
        self._grants = grants
        self._policy = policy
        self.gate: Gate | None = None  # set when there are tiers below
        self._lines = 0  # that were drawn
        self._reserve = int(config.page_reserve * min(pool.pages for pool in kv.pools))

    def spoken_for(self, lagging: Sequence[Session]) -> int:
        """Blocks that running sessions still need for their own input; lagging: of those, who lag by more
        than a token."""
        return sum([self._kv.missing_blocks(session.id, len(session.tokens)) for session in lagging])

    def lacking(self, session: Session) -> int:
        """Tokens of a waiting session that must be computed."""
        if self.gate is not None:
            return self.gate.lacking(session)
        return len(session.tokens) - self._kv.cached_tokens(session.namespace, session.tokens)

    # --- the line ----------------------------------------------------------------------------

    def line_up(
        self, running: Sequence[Session], lagging: Sequence[Session], waiting: Sequence[Session], now: float
    ) -> list[Place]:
        """Waiting turns in the order in which they enter, as far as there is room for them, and the one
        after these. What they lack from below is ordered: for no more turns than could run with it, so
        that nobody's KV is brought only to make room for another's."""
        seats = self._config.max_num_seqs - len(running)
        if seats < 1 and not self._policy.form.displaces:
            return [Place(session, "seats") for session in waiting[:1]]
        order = self._policy.order.line(now)
        if seats < 1:
            return [Place(session, "seats") for session in islice(order, 1)]
        if self.gate is not None:
            order = self._told(self.gate, order, len(waiting), seats)
        line: list[Place] = []
        passed, room, reserved = 0, self.room(running, lagging), self._reserved(running)
        lagging = [session for session in lagging if session.lag > self._config.page_size]
        for session in order:
            limit = ""
            if self._config.prefix_cache and self._prefix_is_coming(session, lagging):
                limit = "prefix"
            else:
                needed = self._kv.needed_blocks(session.namespace, session.tokens)
                if running and not self._fits(session, needed, room, reserved):
                    limit = "gate"
                elif self.gate is not None:
                    limit = self.gate.holds_up(session, room, now)
                room -= needed
                reserved += self._most(session)
            line.append(self._place(session, limit))
            passed += limit in PASSED
            if (limit and limit not in PASSED) or passed == WAITING_EXAMINED or len(line) - passed == seats:
                break
        return line

    def _told(self, gate: Gate, order: Iterator[Session], waiting: int, seats: int) -> Iterator[Session]:
        """The same, of which the tiers have heard. Of a long line that is not in every step: who stands where
        far behind only says whose idle KV is needed last."""
        self._lines += 1
        if waiting > WAITING_EXAMINED and self._lines % TOLD_EVERY:
            return order
        # Nobody enters twice, so no more than this can be passed over or enter.
        drawn = list(islice(order, WAITING_EXAMINED + seats))
        gate.lined_up(drawn)
        return iter(drawn)

    def room(self, running: Sequence[Session], lagging: Sequence[Session]) -> int:
        """Blocks that turns which wait may count on."""
        free = self._kv.available - self._kv.stuck
        return free - self._reserve - self.spoken_for(lagging) if running else free

    def _place(self, session: Session, limit: str) -> Place:
        if not self._policy.form.short_first:
            return Place(session, limit)
        lacking = self.lacking(session)
        return Place(session, limit, lacking, lacking <= self._config.max_batched_tokens)

    def _fits(self, session: Session, needed: int, room: int, reserved: int) -> bool:
        if self._policy.form.reserve is Reserve.OUTPUT:
            return reserved + self._most(session) <= min(p.pages for p in self._kv.pools)
        return needed <= room or not self._config.full_input_gate

    def _reserved(self, running: Sequence[Session]) -> int:
        """Pages that those who run can ever hold, where these are kept for them."""
        if self._policy.form.reserve is not Reserve.OUTPUT:
            return 0
        return sum(self._most(session) for session in running)

    def _most(self, session: Session) -> int:
        """Pages that it can ever hold in this turn."""
        return -(-session.running_turn.limit // self._config.page_size)

    def _prefix_is_coming(self, session: Session, lagging: Sequence[Session]) -> bool:
        """Is somebody else computing a prefix of this session that it could share a little later?

        Worth waiting for when the other will compute more full pages of it than are cached now. lagging:
        who runs and lags by more than a page. Objective: compute each shared prefix once.
        """
        size = self._config.page_size
        known = -1
        for other in lagging:
            if other.namespace != session.namespace:
                continue
            shared = common_prefix(other.tokens, session.tokens) // size * size
            if shared <= other.computed // size * size:
                continue
            if known < 0:
                known = self._kv.cached_tokens(session.namespace, session.tokens)
            if shared > known + size:
                return True
        return False

    # --- entering ----------------------------------------------------------------------------

    def enter(self, session: Session, running: Sequence[Session], draft: Draft, now: float) -> int | None:
        """Match, pass the gate, take the first chunk: how many tokens had KV. None: nothing is held."""
        kv = self._kv
        hit = kv.begin(session.id, session.namespace, session.tokens)
        needed = kv.missing_blocks(session.id, len(session.tokens))
        fits = needed <= self.room(running, draft.lagging)
        if running and self._policy.form.reserve is Reserve.OUTPUT:
            fits = self._fits(session, needed, 0, self._reserved(running))
        elif not self._config.full_input_gate:
            fits = kv.available > (self._reserve if running else 0)
        if not fits:
            kv.release(session.id)
            draft.reasons.append((session.id, "gate" if self._config.full_input_gate else "pages"))
            return None
        if not self._grants.chunk(session, hit, draft):
            kv.release(session.id)
            return None
        self._sessions.admit(session, hit, now)
        if self.gate is not None:
            self.gate.admitted(session, hit, now)
        return hit
