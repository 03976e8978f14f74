"""Keys at rest: a file that the command line changes and a server reads again when it has changed.

`keys.json` has the digests, `pepper` the secret that they are keyed with: who gets hold of one of the
two can check no guess. Both are for their owner alone. A change replaces the file as a whole.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from agentserve.server.tenants.keys import KeyRecord, KeyTable, digest, new_key
from agentserve.tenant_names import is_tenant
from tiering.stores.private import make_folder, new_file

FOLDER = "tenants"  # below the data directory
VERSION = 1
MOST_KEYS = 10_000  # that hold
MOST_OVER = 5_000  # that are kept of those that do not: whose they were is asked of the audit log's lines
MOST_GRACE = 7 * 86400.0  # seconds that a key may be let in beside the one in its place
_PEPPER = 32  # bytes


class KeysError(ValueError):
    """What cannot be done with keys, in one line."""


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    keys: list[KeyRecord]


class KeyFile:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._keys = folder / "keys.json"
        self._pepper = folder / "pepper"

    @property
    def exists(self) -> bool:
        """Keys were made here once."""
        return self._keys.exists()

    def stamp(self) -> tuple[int, int, int] | None:
        """Another one says that the file is another one. None: there is none."""
        try:
            found = self._keys.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def records(self) -> list[KeyRecord]:
        """All keys, the oldest first; none where there is no file. KeysError, OSError."""
        try:
            document = msgspec.json.decode(self._keys.read_bytes(), type=_Document)
        except FileNotFoundError:
            return []
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise KeysError(f"{self._keys}: not a file of keys: {error}") from None
        if document.version != VERSION:
            raise KeysError(f"{self._keys}: version {document.version}, this is a server of {VERSION}")
        return document.keys

    def table(self) -> KeyTable:
        """KeysError, OSError."""
        records = self.records()
        return KeyTable(self._read_pepper() if records else secrets.token_bytes(_PEPPER), records)

    def create(self, tenant: str | None, now: float) -> tuple[KeyRecord, str]:
        """A new key of a tenant, or of an admin (None), with its text, which is kept nowhere. KeysError,
        OSError."""
        if tenant is not None and not is_tenant(tenant):
            raise KeysError(f"{tenant[:80]!r}: a tenant's name is 1 to 64 of A-Z a-z 0-9 . _ : -")
        with locked(self.folder):
            records = self.records()
            if not records and not self._pepper.exists():
                write_whole(self._pepper, secrets.token_bytes(_PEPPER))
            record, key = self._made(tenant, now)
            self._store([*records, record], now)
            return record, key

    def revoke(self, which: Callable[[KeyRecord], bool], now: float) -> list[KeyRecord]:
        """Keys that are let in no longer, for good: those that were. KeysError, OSError."""
        with locked(self.folder):
            records = self.records()
            gone = {
                record.id: record.ended(now, now) for record in records if which(record) and record.holds(now)
            }
            if gone:
                self._store([gone.get(record.id, record) for record in records], now)
            return list(gone.values())

    def rotate(self, id_: str, now: float, grace: float) -> tuple[KeyRecord, str] | None:
        """A new key in the place of one that is let in for `grace` seconds yet; None: there is none such
        that holds. KeysError, OSError."""
        with locked(self.folder):
            records = self.records()
            old = next((record for record in records if record.id == id_ and record.holds(now)), None)
            if old is None:
                return None
            ended = old.ended(now + grace, now)
            record, key = self._made(old.tenant, now)
            self._store([*(ended if one is old else one for one in records), record], now)
            return record, key

    def settle(self, now: float) -> None:
        """Write down which keys are over by now. KeysError, OSError."""
        with locked(self.folder):
            records = self.records()
            if any(record.settled(now) is not record for record in records):
                self._store(records, now)

    def _made(self, tenant: str | None, now: float) -> tuple[KeyRecord, str]:
        name, key = new_key()
        return KeyRecord(name, digest(self._read_pepper(), key), now, tenant), key

    def _store(self, records: list[KeyRecord], now: float) -> None:
        """KeysError where too many hold."""
        records = [record.settled(now) for record in records]
        over = sorted((r for r in records if r.over), key=lambda r: r.revoked or 0.0)
        holding = len(records) - len(over)
        if holding > MOST_KEYS:
            raise KeysError(f"{holding - 1} keys hold, and no more may")
        forgotten = {record.id for record in over[: max(len(over) - MOST_OVER, 0)]}
        kept = [record for record in records if record.id not in forgotten]
        encoded = msgspec.json.encode(_Document(VERSION, kept))
        write_whole(self._keys, msgspec.json.format(encoded, indent=1))

    def _read_pepper(self) -> bytes:
        try:
            pepper = self._pepper.read_bytes()
        except FileNotFoundError:
            pepper = b""
        if len(pepper) != _PEPPER:
            raise KeysError(f"{self._pepper}: the secret that the keys were hashed with is not there")
        return pepper


def write_whole(path: Path, content: bytes) -> None:
    """The whole file or none of it, whenever the machine stops. OSError."""
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    with open(fresh, "wb", opener=new_file) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One at a time changes what is kept there. OSError."""
    make_folder(folder)
    with open(folder / "lock", "wb", opener=new_file) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
