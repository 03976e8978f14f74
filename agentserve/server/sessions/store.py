"""The session environment: an LMDB of its own under the data directory, with one writer.

What is committed here is the truth after a crash: every transaction is synced before it counts. A
record carries a digest over its name and content, for neither LMDB nor the file system looks at them
again; one that does not agree is set aside in a table of its own. And each transaction says what all
records add up to, so that one that is gone or old is missed.

Every page is looked at before LMDB opens a file, and again when LMDB meets damage. A damaged file keeps
a name beside the new one, which has all that could be read; what is then missing of a running server's
sessions is in `take_lost`, for whoever has them in memory. Where the file is gone while a server runs,
that is so for all of them. Nothing of this stops a start or the sessions that are whole.

LMDB's own locks are not used: a lock on a file beside it, which dies with its process, keeps a second
server out, and within the server there is one thread at a time.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lmdb

from agentserve.server.sessions.book import StorageError
from agentserve.server.sessions.changes import Change, Check, Draft, Look
from agentserve.server.sessions.damage import DAMAGE, Damage, one_line
from agentserve.server.sessions.environment import (
    DATA,
    FIRST_MAP,
    FORMAT,
    FORMAT_NAME,
    FRESH,
    OF_SESSIONS,
    Found,
    Open,
    Record,
    Table,
    attach,
    inspected,
    salvaged,
    seal,
    set_aside,
    unsealed,
)
from agentserve.server.sessions.folder import (
    Place,
    holds,
    keep_aside,
    kept_aside,
    locked,
    make,
    place_of,
    sync,
)
from agentserve.server.sessions.tally import TALLY_NAME, Tally, Told

log = logging.getLogger(__name__)

_BATCH = 1000  # records of a transaction, when a file is filled
_LEFT = "the file is not as it was left"

Work = Callable[[Draft], None]


@dataclass(slots=True)
class Stored:
    """What is known of one session; `damaged` counts records that could not be believed. A transcript
    that could not is none."""

    head: bytes | None = None
    turns: dict[int, bytes] = field(default_factory=dict)
    damaged: int = 0
    words: bytes = b""


class SessionStore:
    """One environment, open. Used by one thread at a time."""

    def __init__(self, folder: Path, opener: Open = lmdb.open) -> None:
        """Opens or makes it. ValueError, in one line, if another server has it, its format is not ours
        or the folder cannot be used."""
        self.damages: list[Damage] = []  # since the start; only ever added to
        self.kept_aside = 0  # damaged files that were there when it was opened last
        self._folder = folder
        self._data = folder / DATA
        self._open = opener
        self._env: Any = None
        self._tables: dict[Table, Any] = {}
        self._lock = -1
        self._file = -1  # the data file, open to be read should it be gone
        self._map = FIRST_MAP
        self._tally = Tally()
        self._place: Place | None = None  # of the file when it was last written
        self._lost: set[bytes] = set()
        self._guard = threading.Lock()  # of `_lost`
        try:
            make(folder)
            self._lock = locked(folder)
            self._start()
        except (lmdb.Error, OSError) as error:
            self.close()
            raise ValueError(f"{folder}: cannot keep sessions here: {one_line(error)}") from error
        except BaseException:
            self.close()
            raise

    def read(self, *, words: bool = True) -> dict[bytes, Stored]:
        """Everything, by session; transcripts only with `words`. StorageError."""
        found: dict[bytes, Stored] = {}
        try:
            with self._env.begin() as txn:
                for table in OF_SESSIONS:
                    with txn.cursor(self._tables[table]) as cursor:
                        if table is Table.WORDS and not words:
                            for name in cursor.iternext(keys=True, values=False):
                                found.setdefault(name, Stored())
                            continue
                        for name, sealed in cursor:
                            _file(found, table, name, sealed)
        except lmdb.Error as error:
            raise StorageError(f"{self._folder}: {one_line(error)}") from error
        return found

    def words(self, session: bytes) -> bytes:
        """A session's transcript; empty where there is none that can be believed. StorageError."""
        try:
            with self._env.begin() as txn:
                sealed = txn.get(session, db=self._tables[Table.WORDS])
        except lmdb.Error as error:
            raise StorageError(f"{self._folder}: {one_line(error)}") from error
        return b"" if sealed is None else unsealed(Table.WORDS, session, sealed) or b""

    def write(self, changes: Sequence[Change]) -> None:
        """All of it, in order and synced, or nothing: StorageError."""
        if all(isinstance(change, Look) for change in changes):
            self._transact(None)
            return

        def work(draft: Draft) -> None:
            for change in changes:
                draft.apply(change)

        checks = [change.seconds for change in changes if isinstance(change, Check)]
        self._transact(work, check=max(checks, default=None))

    def set_aside(self, session: bytes) -> None:
        """Put a session's records where no start reads them, as they are. StorageError."""
        self._transact(lambda draft: draft.set_aside(session))

    def take_lost(self) -> set[bytes]:
        """Sessions of which records were lost since the last call, while they were in use. Any thread."""
        with self._guard:
            lost, self._lost = self._lost, set()
        return lost

    @property
    def closed(self) -> bool:
        return self._lock < 0

    def close(self) -> None:
        """Idempotent. Lets another server in."""
        self._drop()
        self._hold(-1)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # --- opening ---------------------------------------------------------------------

    def _start(self) -> None:
        with suppress(FileNotFoundError):
            (self._folder / FRESH).unlink()
        if place_of(self._data) is None:
            self._fill(Found())
            return
        found = inspected(self._data)
        if found.problem is not None:
            self._replace(found.problem)
            return
        _check_format(self._folder, found.format)
        self._tally = found.tally
        if found.told is not None and found.missing != 0:
            self._note(Damage(_LEFT, "", found.missing))
        elif found.broken:
            self._note(Damage(_LEFT, "", found.broken))
        self._attach()

    def _attach(self) -> None:
        """Open the file, which adds up to the tally or is made to say so."""
        self._env, self._tables = attach(self._data, self._open, self._map)
        self._map = int(self._env.info()["map_size"])
        if self._told() != self._tally.told(self._env.info()["last_txnid"], Tally()):
            self._commit(lambda draft: None)
        self._place = place_of(self._data)
        self._hold(os.open(self._data, os.O_RDONLY | os.O_CLOEXEC))
        self.kept_aside = len(kept_aside(self._folder))
        sync(self._folder)

    def _told(self) -> Told | None:
        with self._env.begin() as txn:
            sealed = txn.get(TALLY_NAME, db=self._tables[Table.META])
        return None if sealed is None else Told.read(unsealed(Table.META, TALLY_NAME, sealed))

    def _fill(self, found: Found) -> Path | None:
        """Make a file with these records, and let it take the place of the one that is there, which is
        kept: its name, if there was one."""
        fresh = self._folder / FRESH
        with suppress(FileNotFoundError):
            fresh.unlink()
        before, self._tally = self._tally, Tally()
        try:
            self._env, self._tables = attach(fresh, self._open, self._map)
            for start in range(0, max(1, len(found.records)), _BATCH):
                records = found.records[start : start + _BATCH]
                self._commit(partial(_put_all, records))
            self._drop()
            kept = keep_aside(self._data) if place_of(self._data) is not None else None
            fresh.replace(self._data)
        except BaseException:
            self._tally = before  # of the file that is still there
            raise
        self._attach()
        return kept

    # --- writing ---------------------------------------------------------------------

    def _transact(self, work: Work | None, *, check: float | None = None) -> None:
        """`work` None: there is nothing to write. `check`: seconds to look at the file first."""
        try:
            try:
                self._be_there()
                if check is not None:
                    self._look(check)
                if work is not None:
                    self._commit(work)
            except DAMAGE as error:
                self._mend(one_line(error))
                work = work or (lambda draft: None)
                try:
                    self._commit(work)
                except DAMAGE as again:
                    self._replace(one_line(again))
                    self._commit(work)
        except (lmdb.Error, OSError, ValueError) as error:
            self._drop()  # LMDB refuses all work after some failures until it is opened again
            raise StorageError(f"{self._folder}: {one_line(error)}") from error

    def _commit(self, work: Work) -> None:
        while True:
            try:
                with self._env.begin(write=True, buffers=True) as txn:
                    draft = Draft(txn, self._tables, self._tally)
                    work(draft)
                    told = self._tally.told(txn.id(), draft.tally).packed()
                    draft.put(Table.META, FORMAT_NAME, b"%d" % FORMAT)
                    draft.put(Table.META, TALLY_NAME, seal(Table.META, TALLY_NAME, told))
            except lmdb.MapFullError:
                self._map *= 2
                self._env.set_mapsize(self._map)
                continue
            self._tally.merge(draft.tally)
            self._place = place_of(self._data) or self._place
            return

    def _be_there(self) -> None:
        """The file is open, where it was and not shorter than it was. OSError where another has its place."""
        there, was = place_of(self._data), self._place
        if there is None:
            self._come_back()
        elif was is not None and not there.is_file(was):
            raise OSError(f"another file has taken the place of {DATA}; move it away, or start again with it")
        elif was is not None and there.size < was.size:
            self._mend(f"the file was cut from {was.size} to {there.size} bytes while it was in use")
        elif self._env is None:
            self._attach_again()

    def _attach_again(self) -> None:
        """After a failure: whether the transaction that failed has reached the disk is to be seen."""
        self._env, self._tables = attach(self._data, self._open, self._map)
        if self._told() != self._tally.told(self._env.info()["last_txnid"], Tally()):
            self._mend("a transaction failed")

    def _look(self, seconds: float) -> None:
        """Look at the pages of the file that is open, for so long at most."""
        found = inspected(self._data, seconds)
        if found.problem is not None or (found.whole and found.tally.differing(self._tally)):
            self._mend(_LEFT)

    def _come_back(self) -> None:
        """The file was deleted or moved away: begin again where it was. All is lost that was in it, but for
        those who have it in memory; the same is true of a restart, which would not know that. What was set
        aside is in nobody's memory: it comes along."""
        self._drop()
        aside: list[Record] = []
        with suppress(OSError):  # where files that are gone cannot be read
            aside = set_aside(Path(f"/proc/self/fd/{self._file}"))
        before = self._tally
        make(self._folder)
        if not holds(self._lock, self._folder):
            lock = locked(self._folder)
            os.close(self._lock)
            self._lock = lock
        self._fill(Found(records=aside))
        self._lose(before)
        self._note(Damage("the file was deleted or moved away while it was in use", "", before.rows))

    def _mend(self, reason: str) -> None:
        """LMDB met something that should not be: look at all pages, and replace the file if it is damaged."""
        self._drop()
        found = inspected(self._data)
        if found.problem is not None:
            self._replace(found.problem)
            return
        before, self._tally = self._tally, found.tally
        self._lose(before)
        if found.broken:
            self._note(Damage(reason, "", found.broken))
        else:
            log.debug("the sessions in %s were opened again: %s", self._folder, reason)
        self._attach()

    def _replace(self, reason: str) -> None:
        """Go on with a new file of what can be read; the old one stays beside it."""
        self._drop()
        found = salvaged(self._data)
        _check_format(self._folder, found.format)
        before = self._tally
        kept = self._fill(found)
        self._lose(before)
        missing = found.missing
        if before.rows:  # what this server knows is more than a damaged file can tell
            missing = max(0, before.rows - self._tally.rows)
        self._note(Damage(reason, kept.name if kept else "", missing))

    def _lose(self, before: Tally) -> None:
        with self._guard:
            self._lost |= before.differing(self._tally)

    def _note(self, damage: Damage) -> None:
        self.damages.append(damage)
        log.error("the sessions in %s were damaged: %s", self._folder, damage)

    def _hold(self, file: int) -> None:
        before, self._file = self._file, file
        if before >= 0:
            os.close(before)

    def _drop(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()


def _put_all(records: Sequence[Record], draft: Draft) -> None:
    for table, name, sealed in records:
        draft.put(table, name, sealed)


def _check_format(folder: Path, found: bytes | None) -> None:
    if found is not None and found != b"%d" % FORMAT:
        shown = found[:20].decode("ascii", "replace")
        raise ValueError(
            f"{folder}: its sessions have format {shown}, this version knows {FORMAT}; "
            "move the folder away, or use the version that wrote it"
        )


def _file(found: dict[bytes, Stored], table: Table, name: bytes, sealed: bytes) -> None:
    session, _, number = name.partition(b"\0") if table is Table.TURNS else (name, b"", b"")
    stored = found.setdefault(session, Stored())
    content = unsealed(table, name, sealed)
    if table is Table.WORDS:
        stored.words = content or b""
    elif content is None:
        stored.damaged += 1
    elif table is Table.HEADS:
        stored.head = content
    else:
        stored.turns[int.from_bytes(number, "big")] = content
