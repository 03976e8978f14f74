"""Grants: tokens and pages for one turn in the plan that is being written."""

from __future__ import annotations

from collections.abc import Sequence

from agentserve.core.config import CoreConfig
from agentserve.core.cost import StepCost
from agentserve.core.draft import Draft
from agentserve.core.kv import KVManager
from agentserve.core.plan import Chunk, PageCopy, SampleSpec
from agentserve.core.scheduling.chunking import Caps, chunk_size
from agentserve.core.scheduling.policy import Form
from agentserve.core.session import Session


class Grants:
    """Writes chunks as large as every limit allows, and says which limit bound."""

    def __init__(self, config: CoreConfig, kv: KVManager, cost: StepCost, form: Form) -> None:
        self.cost = cost
        self._config = config
        self._kv = kv
        self._form = form

    def room_for_one(self, session: Session, draft: Draft) -> str:
        """Which limit leaves no room for one token of this session; the first chunk of a step always has."""
        if draft.tokens < 1:
            return "tokens"
        if draft.seconds is None or not draft.chunks:
            return ""
        return "time" if draft.spent + self.cost.chunk(session.computed, 1) > draft.seconds else ""

    def each_one(self, sessions: Sequence[Session], draft: Draft) -> bool:
        """One token for each of these, all of which decode. False, and nothing granted, if any limit could
        bind: then they are to be granted one by one, the most deserving first. This is the usual step, so
        it looks at each of them only to write its chunk, and at pages where an edge is crossed."""
        spent = self.cost.decodes(len(sessions), sum([session.computed for session in sessions]))
        late = draft.seconds is not None and draft.spent + spent > draft.seconds
        if late or len(sessions) > draft.tokens:
            return False
        tables = self._kv.tables
        edges = [
            (session.id, session.computed)
            for session in sessions
            if session.computed >= tables[session.id].writable
        ]
        if edges and not self._kv.extend(edges):
            return False
        write = draft.chunks.append
        for session in sessions:
            name, start, tokens, turn = session.id, session.computed, session.tokens, session.running_turn
            sample = SampleSpec(turn.sampling, tokens, turn.prompt, start + 1)
            write(Chunk(name, turn.id, session.epoch, start, tokens[start:], tables[name].shown(), sample))
        draft.tokens -= len(sessions)
        draft.spent += spent
        return True

    def one(self, session: Session, draft: Draft) -> bool:
        """One token for a session that decodes. False, and nothing granted, if it lacks a page."""
        copies = self._kv.reserve(session.id, session.computed, session.computed + 1)
        if copies is None:
            return False
        self._write(session, session.computed, 1, copies, draft)
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
            most = self.cost.largest_chunk(start, count, draft.seconds - draft.spent)
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
        draft.chunks.append(
            Chunk(
                session.id,
                turn.id,
                session.epoch,
                start,
                session.tokens[start:end],
                self._kv.table(session.id),
                sample,
            )
        )
        draft.tokens -= count
        draft.spent += self.cost.chunk(start, count)
