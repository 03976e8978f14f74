"""Grants: tokens and pages for one turn in the plan that is being written."""

from __future__ import annotations

from collections.abc import Sequence

from agentserve.core.config import CoreConfig
from agentserve.core.cost import StepCost
from agentserve.core.draft import Draft, Times
from agentserve.core.kv import KVManager
from agentserve.core.plan import Chunk, PageCopy, SampleSpec
from agentserve.core.scheduling.chunking import Caps, chunk_size
from agentserve.core.scheduling.policy import Form
from agentserve.core.session import Session
from agentserve.core.timing.tally import Wanted


class Grants:
    """Writes chunks as large as every limit allows, and says which limit bound."""

    def __init__(self, config: CoreConfig, kv: KVManager, times: Times, form: Form) -> None:
        self._times = times
        self._config = config
        self._kv = kv
        self._form = form

    @property
    def cost(self) -> StepCost:
        return self._times.cost

    def room_for_one(self, session: Session, draft: Draft, *, in_time: bool) -> str:
        """Which limit leaves no room for one token of this session; the first chunk of a step always has.
        in_time: that no decode is left out for time is known."""
        if draft.tokens < 1:
            return "tokens"
        if in_time or draft.seconds is None or not draft.chunks:
            return ""
        load = draft.tally.with_decode(session.computed, session.running_turn.sampling)
        return "time" if self.cost.bound(load) > draft.seconds else ""

    def all_in_time(self, decodes: Sequence[Session], draft: Draft) -> bool:
        """Whether no decode will be left out for time."""
        if draft.seconds is None:
            return True
        tally = draft.tally.copied_tally()
        for session in decodes:
            tally.decode(session.computed, session.running_turn.sampling)
        return self.cost.bound(tally.load()) <= draft.seconds

    def one(self, session: Session, draft: Draft) -> bool:
        """One token for a session that decodes. False, and nothing granted, if it lacks a page."""
        copies = self._kv.reserve(session.id, session.computed, session.computed + 1)
        if copies is None:
            return False
        self._write(session, session.computed, 1, copies, draft)
        draft.tally.decode(session.computed, session.running_turn.sampling)
        return True

    def chunk(self, session: Session, start: int, draft: Draft) -> bool:
        """As large a chunk from `start` as every limit allows. False if it is none."""
        count, limit = self._size(session, start, draft)
        copies = self._kv.reserve(session.id, start, start + count) if count else None
        if copies is None:
            draft.reasons.append((session.id, limit if count == 0 else "pages"))
            return False
        if limit:
            draft.reasons.append((session.id, limit))
        self._write(session, start, count, copies, draft)
        ends = start + count == len(session.tokens)
        draft.tally.chunk(start, count, session.running_turn.sampling if ends else None)
        draft.prefill = True
        return True

    def _size(self, session: Session, start: int, draft: Draft) -> tuple[int, str]:
        """Tokens for `session` in this step, and the limit that binds if that is not all of them."""
        size, lag = self._config.page_size, len(session.tokens) - start
        held = self._kv.blocks_of(session.id) * size
        room = max(held, start // size * size) + self._kv.available * size - start
        if not self._form.chunked:
            if lag > room:
                return 0, "pages"
            return (lag, "") if lag <= draft.tokens or not draft.prefill else (0, "tokens")

        def in_time(count: int) -> int:
            assert draft.seconds is not None
            wanted = Wanted(start, count, lag, session.running_turn.sampling)
            most = self.cost.largest(draft.tally, wanted, draft.seconds)
            if draft.chunks:
                return most
            return max(most, min(count, size - start % size))  # something must run, whatever it takes

        caps = Caps(draft.tokens, room, in_time if draft.seconds is not None else None)
        return chunk_size(start, lag, size, caps)

    def _write(self, session: Session, start: int, count: int, copies: list[PageCopy], draft: Draft) -> None:
        turn, end = session.running_turn, start + count
        sample = None
        if end == len(session.tokens):
            sample = SampleSpec(turn.sampling, session.tokens, turn.prompt, end)
        draft.copies.extend(copies)
        draft.tally.copy(copies)
        draft.chunks.append(
            Chunk(
                session.id,
                turn.id,
                session.epoch,
                start,
                session.tokens[start:end],
                self._kv.table(session.id, end),
                sample,
            )
        )
        draft.tokens -= count
