"""The book of a directory: its sessions in an LMDB, written by a thread, read at a start.

While the disk fails, turns are refused before they run (`ready` tries it again for each): a server
that cannot keep what it promises must not promise it. What it has in memory stays, readable; when the
disk is back, sessions go on where they are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from agentserve.clock import Clock
from agentserve.server.sessions.book import booked
from agentserve.server.sessions.environment import Table
from agentserve.server.sessions.session_record import CommittedTurn, Session
from agentserve.server.sessions.store import Change, Delete, Forget, Put, SessionStore, Stored, turn_name
from agentserve.server.sessions.stored import head_bytes, read_session, turn_bytes
from agentserve.server.sessions.transcript import Transcript, read_transcript
from agentserve.server.sessions.writer import Failure, GroupWriter

log = logging.getLogger(__name__)

OpenStore = Callable[[Path], SessionStore]
PATIENCE = 10.0  # seconds the last writes may take when the server leaves


class Journal:
    """A `Book`. Its methods are called on the event loop, or before there is one."""

    def __init__(self, store: SessionStore, text: bytes, clock: Clock, wall: Callable[[], float]) -> None:
        """`text`: digest of what token ids depend on. `wall`: Unix time."""
        self._store = store
        self._text = text
        self._clock = clock
        self._ahead = wall() - clock.now()
        self._writer = GroupWriter(store.write, wall)
        self.skipped = 0  # sessions that could not be read at the start
        self.transcripts: list[Transcript] = []  # of those that could, as `sessions` found them

    @property
    def failure(self) -> Failure | None:
        """Why nothing is kept now; None: all is well."""
        return self._writer.failure

    async def ready(self) -> None:
        """Try a disk that failed once more. StorageFailed if it still does."""
        if self.failure is not None:
            await booked(self.retry())

    def retry(self) -> Future[None]:
        """Write something, and what is owed."""
        return self._writer.put(Put(Table.META, b"tried", b""), lasting=False)

    async def close(self) -> None:
        """Write what is left and let another server in."""
        if await asyncio.to_thread(self._writer.close, PATIENCE):
            self._store.close()
        else:
            log.error("the disk takes too long: the last changes of sessions may be lost")

    # --- Book ------------------------------------------------------------------------

    def keep(self, session: Session, since: float | None) -> Future[None]:
        return self._writer.put(self._head(session, since), lasting=True)

    def open(self, session: Session, beginning: CommittedTurn, since: float | None) -> Future[None]:
        record = self._record(session, beginning)
        return self._writer.put(self._head(session, since), record, lasting=False)

    def add(self, session: Session, turn: CommittedTurn, words: bytes) -> Future[None]:
        changes = (self._head(session, None), self._record(session, turn), self._words(session, words))
        return self._writer.put(*changes, lasting=False)

    def words(self, session: Session, words: bytes) -> Future[None]:
        return self._writer.put(self._words(session, words), lasting=True)

    def undo(self, session: Session, turn: int, since: float | None) -> Future[None]:
        # A write that failed may have reached the disk all the same.
        record = Delete(Table.TURNS, self._turn(session, turn))
        return self._writer.put(record, self._head(session, since), lasting=True)

    def forget(self, session: Session) -> Future[None]:
        return self._writer.put(Forget(session.key.encode()), lasting=True)

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

    # --- the start -------------------------------------------------------------------

    def sessions(self) -> list[tuple[Session, float | None]]:
        """All that can be read; the records of others are set aside, counted and logged once."""
        found: list[tuple[Session, float | None]] = []
        names: set[tuple[str, str]] = set()
        calls: set[tuple[str, str]] = set()
        bad: list[str] = []
        for key, stored in self._store.read().items():
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
            found.append((session, since))
            words = read_transcript(stored.words, session.key, len(session.chain)) if stored.words else None
            if words is not None:
                self.transcripts.append(words)
        self.skipped = len(bad)
        if bad:
            log.error("%d session(s) could not be read and were set aside: %s", len(bad), "; ".join(bad[:3]))
        return found

    def _read(self, key: bytes, stored: Stored) -> tuple[Session, float | None]:
        if stored.damaged or stored.head is None:
            raise ValueError(f"{stored.damaged} damaged record(s)" if stored.damaged else "no head")
        return read_session(key.decode("ascii"), stored.head, stored.turns, self._text, self._monotonic)
