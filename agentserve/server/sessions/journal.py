"""The book of a directory: its sessions in an LMDB, written by a thread, read at a start.

While the disk fails, turns are refused before they run (`ready` tries it again for each): a server
that cannot keep what it promises must not promise it. What it has in memory stays, readable; when the
disk is back, sessions go on where they are. What a damaged file lost of them is written again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path

from agentserve.clock import Clock
from agentserve.server.sessions.book import booked
from agentserve.server.sessions.changes import (
    Change,
    Check,
    Delete,
    Fold,
    Forget,
    Look,
    Put,
    turn_name,
)
from agentserve.server.sessions.damage import Damage
from agentserve.server.sessions.environment import Table
from agentserve.server.sessions.errors import StorageFailed
from agentserve.server.sessions.mending import Known, Mender
from agentserve.server.sessions.retry import Retry
from agentserve.server.sessions.session_record import CommittedTurn, Session
from agentserve.server.sessions.store import SessionStore, Stored
from agentserve.server.sessions.stored import head_bytes, read_session, turn_bytes
from agentserve.server.sessions.transcript import MOST_BYTES, Transcript, read_transcript
from agentserve.server.sessions.writer import PATIENCE, Failure, GroupWriter
from agentserve.types import SessionId
from tiering.hints import MOST_SECONDS

log = logging.getLogger(__name__)

OpenStore = Callable[[Path], SessionStore]
LAST_PATIENCE = 10.0  # seconds the last writes may take when the server leaves
LAST_LOOK = 5.0  # and to look for damage then, when they are on disk


class Journal:
    """A `Book`. Its methods are called on the event loop, or before there is one."""

    def __init__(
        self,
        store: SessionStore,
        text: bytes,
        clock: Clock,
        wall: Callable[[], float],
        patience: float = PATIENCE,
        *,
        most_words: int = MOST_BYTES,
    ) -> None:
        """`text`: digest of what token ids depend on. `wall`: Unix time. `patience`: seconds that a client
        waits for the disk. `most_words`: bytes of transcripts that a start reads."""
        self._store = store
        self._text = text
        self._most_words = most_words
        self._clock = clock
        self._ahead = wall() - clock.now()
        self._writer = GroupWriter(store.write, wall, patience)
        self._mender = Mender(self._whole)
        self._retry = Retry(self._writer, lambda change: self._put(change, lasting=False))
        self._looked: Future[None] | None = None
        self.words_of: Callable[[SessionId], bytes] | None = None  # a session's transcript, as it is now
        self.skipped = 0  # sessions that could not be read at the start
        self.transcripts: list[Transcript] = []  # of those that could, as `sessions` found them

    @property
    def failure(self) -> Failure | None:
        """Why nothing is kept now; None: all is well."""
        return self._writer.failure

    @property
    def damages(self) -> Sequence[Damage]:
        """What was wrong with the file, since the start."""
        return self._store.damages

    @property
    def kept_aside(self) -> int:
        """Damaged files that are there for somebody to look at."""
        return self._store.kept_aside

    async def ready(self) -> None:
        """Try a disk that failed once more. StorageFailed if it still does."""
        await self._retry.ready()

    def retry(self) -> Future[None]:
        """Write what is owed, and something as large as what did not fit."""
        return self._retry.again()

    def look(self) -> None:
        """See whether the file is still where it was, though nothing is to be written; try a disk that failed
        once more."""
        if self.failure is not None:
            self.retry()
        elif self._looked is None or self._looked.done():
            self._looked = self._put(Look(), lasting=False)

    async def close(self) -> None:
        """Write what is left, in a file that is sound, and let another server in."""
        if not self._writer.hung:
            with suppress(StorageFailed, TimeoutError):
                await self._mender.close()
                owed = self._put(Put(Table.META, b"tried", b""), lasting=False)  # and all before it
                await asyncio.wait_for(booked(owed), LAST_PATIENCE)
                # What is damaged and was not met yet is still in memory.
                checked = self._put(Check(LAST_LOOK), lasting=False)
                await asyncio.wait_for(booked(checked), LAST_PATIENCE)
        await self._mender.close()
        if await asyncio.to_thread(self._writer.close, LAST_PATIENCE):
            self._store.close()
        else:
            log.error("the disk takes too long: the last changes of sessions may be lost")

    # --- Book ------------------------------------------------------------------------

    def keep(self, session: Session, since: float | None) -> Future[None]:
        self._know(session, since)
        return self._put(self._head(session, since), lasting=True)

    def open(self, session: Session, beginning: CommittedTurn, since: float | None) -> Future[None]:
        self._know(session, since)
        record = self._record(session, beginning)
        return self._put(self._head(session, since), record, lasting=False)

    def add(self, session: Session, turn: CommittedTurn, words: bytes) -> Future[None]:
        self._know(session, None)
        changes = (self._head(session, None), self._record(session, turn), self._words(session, words))
        return self._put(*changes, lasting=False)

    def words(self, session: Session, words: bytes) -> Future[None]:
        return self._put(self._words(session, words), lasting=True)

    def drop_words(self, key: SessionId) -> None:
        """There was no room for a session's transcript: it is not to come back, and not to fill the disk."""
        self._put(Delete(Table.WORDS, key.encode()), lasting=True)

    def undo(self, session: Session, turn: int, since: float | None) -> Future[None]:
        # A write that failed may have reached the disk all the same.
        self._know(session, since)
        record = Delete(Table.TURNS, self._turn(session, turn))
        return self._put(record, self._head(session, since), lasting=True)

    def forget(self, session: Session) -> Future[None]:
        self._mender.known.pop(session.key, None)
        return self._put(Forget(session.key.encode()), lasting=True)

    def _know(self, session: Session, since: float | None) -> None:
        self._mender.known[session.key] = Known(session, since)

    def _put(self, *changes: Change, lasting: bool) -> Future[None]:
        done = self._writer.put(*changes, lasting=lasting)
        with suppress(RuntimeError):  # before there is a loop, nothing is served that could be lost
            done.add_done_callback(partial(self._look, asyncio.get_running_loop()))
        return done

    def _look(self, loop: asyncio.AbstractEventLoop, _: Future[None]) -> None:
        """After a write, on the writer's thread: what the store has lost must be written again."""
        if lost := self._store.take_lost():
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._mender.lost, lost)

    def _whole(self, known: Known) -> Future[None]:
        """Write all of a session that is committed."""
        session = known.session
        name = session.key.encode()
        last = session.last_turn if session.running is None else session.running - 1
        whole = self._record(session, session.folded())
        changes: list[Change] = [Fold(name, last), self._head(session, known.waits_since), whole]
        if self.words_of is not None:
            changes.append(self._words(session, self.words_of(session.key)))
        return self._put(*changes, lasting=True)

    def _record(self, session: Session, turn: CommittedTurn) -> Put:
        return Put(Table.TURNS, self._turn(session, turn.turn), turn_bytes(turn, self._text, self.unix))

    @staticmethod
    def _words(session: Session, words: bytes) -> Change:
        name = session.key.encode()
        return Put(Table.WORDS, name, words) if words else Delete(Table.WORDS, name)

    def _head(self, session: Session, since: float | None) -> Put:
        return Put(Table.HEADS, session.key.encode(), head_bytes(session, since, self.unix))

    @staticmethod
    def _turn(session: Session, turn: int) -> bytes:
        return turn_name(session.key.encode(), turn)

    def unix(self, at: float) -> float:
        """A moment of the monotonic clock as the Unix time it is kept as."""
        return at + self._ahead

    def _monotonic(self, at: float) -> float:
        """Nothing kept is of the future, whatever was done to the machine's clock meanwhile."""
        return min(at - self._ahead, self._clock.now())

    def _to_come(self, at: float) -> float:
        """A deadline: nobody could name one that is further away."""
        return min(at - self._ahead, self._clock.now() + MOST_SECONDS)

    # --- the start -------------------------------------------------------------------

    def sessions(self) -> list[tuple[Session, float | None]]:
        """All that can be read; the records of others are set aside, counted and logged once."""
        found: list[tuple[Session, float | None]] = []
        names: set[tuple[str, str]] = set()
        calls: set[tuple[str, str]] = set()
        bad: list[str] = []
        for key, stored in self._store.read(words=False).items():
            try:
                session, since = self._read(key, stored)
                name = (session.tenant, session.public_id)
                issued = {(session.tenant, call) for call in session.issued.keys() - session.inherited}
                if name in names or issued & calls:
                    raise ValueError("it has the name or a call of another")
            except ValueError as error:  # msgspec's and Unicode's are too
                bad.append(f"{key[:40]!r}: {' '.join(str(error).split())[:120]}")
                self._store.set_aside(key)
                continue
            names.add(name)
            calls |= issued
            self._know(session, since)
            found.append((session, since))
        self._read_words([session for session, _ in found])
        self.skipped = len(bad)
        if bad:
            log.error("%d session(s) could not be read and were set aside: %s", len(bad), "; ".join(bad[:3]))
        return found

    def _read_words(self, sessions: Sequence[Session]) -> None:
        """The transcripts of those used last, as far as there is room for them in memory; the others leave
        the disk, or the next start would find still more of them."""
        left = self._most_words
        names = [session.key.encode() for session in sorted(sessions, key=lambda one: -one.used)]
        for place, session in enumerate(sorted(sessions, key=lambda one: -one.used)):
            raw = self._store.words(names[place])
            left -= len(raw)
            if left < 0:
                self._put(*(Delete(Table.WORDS, name) for name in names[place:]), lasting=True)
                break
            words = read_transcript(raw, session.key, len(session.chain)) if raw else None
            if words is not None:
                self.transcripts.append(words)
        self.transcripts.reverse()  # the longest unused first, as they are to go

    def _read(self, key: bytes, stored: Stored) -> tuple[Session, float | None]:
        if stored.damaged or stored.head is None:
            raise ValueError(f"{stored.damaged} damaged record(s)" if stored.damaged else "no head")
        name = key.decode("ascii")
        return read_session(
            name, stored.head, stored.turns, self._text, self._monotonic, to_come=self._to_come
        )
