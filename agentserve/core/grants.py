"""Grants: tokens and pages for one turn in the plan that is being written."""

from __future__ import annotations

from collections.abc import Sequence

from agentserve.core.config import CoreConfig
from agentserve.core.draft import Draft, Times
from agentserve.core.kv import KVManager
from agentserve.core.plan import Chunk, PageCopy, SampleSpec
from agentserve.core.scheduling.chunking import Caps, chunk_size
from agentserve.core.scheduling.policy import Form
from agentserve.core.session import Session
from agentserve.core.timing.tally import Tally, Wanted


class Grants:
    """Writes chunks as large as every limit allows, and says which limit bound."""

    def __init__(self, config: CoreConfig, kv: KVManager, times: Times, form: Form) -> None:
        self._times = times
        self._config = config
        self._kv = kv
        self._form = form

    def room_for_one(self, session: Session, draft: Draft) -> str:
        """Which limit leaves no room for one token of this session; the first chunk of a step always has."""
        if draft.tokens < 1:
            return "tokens"
        if draft.seconds is None or not draft.chunks:
            return ""
        load = self._tally(draft).with_decode(session.computed, session.running_turn.sampling)
        return "time" if self._times.cost.bound(load) > draft.seconds else ""

    def each_one(self, sessions: Sequence[Session], draft: Draft) -> bool:
        """One token for each of these, all of which decode. False, and nothing granted, if any limit could
        bind: then they are to be granted one by one, the most deserving first. This is the usual step, so
        it looks at each of them only to write its chunk, and at pages where an edge is crossed."""
        if len(sessions) > draft.tokens:
            return False
        tally, turns = draft.tally.another(), [session.running_turn for session in sessions]
        tally.decodes_of(
            len(sessions),
            self._times.attention.seen_by([session.computed for session in sessions]),
            sum([turn.picks for turn in turns]),
        )
        if draft.seconds is not None and self._times.cost.bound(tally.load()) > draft.seconds:
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
        for session, turn in zip(sessions, turns, strict=True):
            name, start, tokens = session.id, session.computed, session.tokens
            sample = SampleSpec(turn.sampling, tokens, turn.prompt, start + 1)
            write(Chunk(name, turn.id, session.epoch, start, tokens[start:], tables[name].shown(), sample))
        draft.tokens -= len(sessions)
        draft.tally = tally
        return True

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
            most = self._times.cost.largest(self._tally(draft), wanted, draft.seconds)
            if draft.chunks:
                return most
            return max(most, min(count, size - start % size))  # something must run, whatever it takes

        caps = Caps(draft.tokens, room, in_time if draft.seconds is not None else None)
        return chunk_size(start, lag, size, caps)

    def _tally(self, draft: Draft) -> Tally:
        """What there is, and the copies that the chunk may need which is granted next."""
        return draft.tally.with_copies() if self._times.cost.minds_copies else draft.tally

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
                self._kv.table(session.id),
                sample,
            )
        )
        draft.tokens -= count
