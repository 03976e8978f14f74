"""An LMDB environment for blocks: owned by one process, or not opened; trusted, or started afresh.

A folder holds `data.mdb` and `lock.mdb` (LMDB's), `owner` (locked by the process that writes here) and
`state` (whether everything was synced, else in which boot of the machine it was last written).

Commits are not synced: it is a cache. A killed process loses nothing that was committed, for the
system has it and writes it out in its own time. But when power goes, or the system crashes, parts of
the file may be old and parts new, which LMDB would take for its own tree. So what was written in
another boot and not synced is not opened at all: a power cut costs the blocks on disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import lmdb

from tiering.stores.descents import cut_off, read_tree
from tiering.stores.disk_format import VERSION
from tiering.stores.private import make_folder, new_file
from tiering.types import TierFault

log = logging.getLogger(__name__)

RESERVE = 4 << 20  # bytes that the map grows by when even a deletion finds no room

DATA, LOCK = "data.mdb", "lock.mdb"
_STATE, _OWNER = "state", "owner"
_BLOCKS, _INDEX = b"blocks", b"index"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SYNCED, _UNSURE = "synced", "unsure"
_HEAD = b"head"
_RECORD = struct.Struct("<QI")  # of the index: when it was written (counts up), bytes of its value


class StoreError(ValueError):
    """A disk store cannot be had; the text is one line for the operator."""


class StoreBusy(StoreError):
    """Another process has it."""


class Untrusted(Exception):
    """What lies in a folder is not to be used."""


@dataclass(frozen=True)
class Found:
    """A block that the index names."""

    key: bytes
    order: int  # when it was written, among others of its environment
    length: int  # of its value


def worker_folder(data_dir: Path, worker: int) -> Path:
    """Where worker number `worker` keeps KV."""
    return data_dir / "kv" / f"worker-{worker}"


def orphans(data_dir: Path, workers: int) -> list[Path]:
    """Folders with KV of workers that a server of `workers` workers does not have: `DiskStore.adopt` is
    for these. (Not for one that is being restarted: it opens its own.)"""
    return worker_folders(data_dir, workers)


def worker_folders(data_dir: Path, first: int = 0) -> list[Path]:
    """Folders with KV of workers, of number `first` and on, in the order of their numbers."""
    found = []
    for folder in (data_dir / "kv").glob("worker-*"):
        number = folder.name.removeprefix("worker-")
        if number.isdecimal() and int(number) >= first and (folder / DATA).exists():
            found.append((int(number), folder))
    return [folder for _, folder in sorted(found)]


def trusted(folder: Path) -> bool:
    """Whether what lies in `folder` may be opened: synced, or written in this boot of the machine."""
    return _trusted(folder, boot_id())


def distrust(folder: Path) -> bool:
    """Have the next one that opens `folder` start afresh. Whether that could be written down."""
    try:
        _mark(folder, _UNSURE, "")
    except OSError as error:
        log.warning("%s cannot be marked as broken: %s", folder, error)
        return False
    return True


def boot_id() -> str:
    """Names this run of the system; empty where it does not say."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


class Environment:
    """An open environment. `blocks`: key -> value; `index`: key -> order, length (LMDB touches a whole
    value to tell its length); `stock`: what the index named when it was opened, in the order of writing;
    `faults`: what was found wrong then."""

    def __init__(self, folder: Path, handle: lmdb.Environment, owner: int, writable: bool) -> None:
        self.folder = folder
        self.handle = handle
        found = (folder / DATA).stat()
        self._place = (found.st_dev, found.st_ino)
        self.blocks = handle.open_db(_BLOCKS, create=writable)
        self.index = handle.open_db(_INDEX, create=writable)
        self.stock = self._found()
        self.faults: list[TierFault] = []
        self._meta = handle.open_db(b"meta", create=False)
        self.closed = False
        self._distrusted = False
        self._owner = owner
        self._writable = writable

    def _found(self) -> list[Found]:
        """What the index names, in the order of writing."""
        found = []
        with self.handle.begin(db=self.index) as txn:
            for key, record in txn.cursor():
                if len(record) != _RECORD.size:
                    raise Untrusted("its index cannot be read")
                found.append(Found(key, *_RECORD.unpack(record)))
        return sorted(found, key=lambda entry: entry.order)

    def delete_unindexed(self) -> None:
        """Delete values that the index does not name. Reads all values if there seem to be any."""
        with self.handle.begin() as txn:
            if txn.stat(self.blocks)["entries"] == txn.stat(self.index)["entries"]:
                return
            keys = txn.cursor(self.blocks).iternext(keys=True, values=False)
            lost = [key for key in keys if txn.get(key, db=self.index) is None]
        if lost:
            log.warning("%d blocks in %s are not in its index: deleted", len(lost), self.folder)
            with self.handle.begin(write=True) as txn:
                for key in lost:
                    txn.delete(key, db=self.blocks)
            self.faults += [TierFault.UNINDEXED] * len(lost)

    def put(self, txn: lmdb.Transaction, key: bytes, value: memoryview, order: int) -> None:
        txn.put(key, value, db=self.blocks)
        txn.put(key, _RECORD.pack(order, len(value)), db=self.index)

    def delete(self, txn: lmdb.Transaction, key: bytes) -> None:
        txn.delete(key, db=self.blocks)
        txn.delete(key, db=self.index)

    def clear(self) -> None:
        """Forget all blocks. lmdb.Error."""
        with self.handle.begin(write=True) as txn:
            for table in (self.blocks, self.index):
                txn.drop(table, delete=False)
        self.stock = []

    def touch(self) -> None:
        """A transaction that changes nothing."""
        with self.handle.begin(db=self._meta, write=True) as txn:
            head = txn.get(_HEAD)
            if head is not None:
                txn.put(_HEAD, head)

    def distrust(self) -> None:
        """Do not open this again as it is."""
        self._distrusted = True
        distrust(self.folder)

    @property
    def there(self) -> bool:
        """Whether its file still lies where it was opened."""
        try:
            found = (self.folder / DATA).stat()
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._place

    def abandon(self) -> None:
        """Let go of it as it is: what lies in its folder now is another's."""
        self._distrusted = True
        self.close()

    def close(self, remove: bool = False) -> None:
        """remove: delete everything in it, too."""
        self.closed = True
        try:
            try:
                if self._writable and not self._distrusted and not remove:
                    self.handle.sync(True)
            finally:
                self.handle.close()
            if remove:
                _wipe(self.folder)
            elif self._writable and not self._distrusted:
                _mark(self.folder, _SYNCED, "")
        except (lmdb.Error, OSError) as error:
            log.warning("KV on disk in %s may be lost: it could not be written out: %s", self.folder, error)
        finally:
            os.close(self._owner)


def open_environment(folder: Path, namespace: bytes, map_bytes: int) -> Environment:
    """Open `folder` for writing; what cannot be trusted there is deleted first, with a line in the log.

    Raises StoreBusy if another process (or store) has it, StoreError if nothing can be kept there.
    """
    owner = _own(folder, create=True)
    try:
        try:
            environment = _open(folder, namespace, map_bytes, owner)
        except (lmdb.Error, Untrusted) as reason:
            log.warning("KV on disk in %s is started afresh: %s", folder, _line(reason))
            _wipe(folder)
            environment = _open(folder, namespace, map_bytes, owner)
            environment.faults.append(TierFault.DISCARDED)
    except (lmdb.Error, OSError, Untrusted) as error:
        os.close(owner)
        raise StoreError(f"no KV can be kept in {folder}: {_line(error)}") from error
    return environment


def adopt_environment(folder: Path, namespace: bytes) -> Environment:
    """Open `folder`, which no process has, for reading. Raises StoreBusy if one has it, StoreError if its
    blocks cannot be used: then they are deleted, for nobody else would."""
    owner = _own(folder, create=False)
    try:
        if not trusted(folder):
            raise Untrusted("it was not synced before the system ended")
        read_tree(folder, _BLOCKS, _INDEX)
        handle = lmdb.open(str(folder), readonly=True, lock=False, max_dbs=3)
        try:
            check_content(handle, folder, namespace)
            return Environment(folder, handle, owner, writable=False)
        except (lmdb.Error, OSError, Untrusted):
            handle.close()
            raise
    except (lmdb.Error, OSError, Untrusted) as error:
        with contextlib.suppress(OSError):
            _wipe(folder)
        os.close(owner)
        raise StoreError(f"KV in {folder} is deleted, not adopted: {_line(error)}") from error


def _own(folder: Path, create: bool) -> int:
    """The descriptor of the locked owner file; the lock ends with it, or with the process."""
    try:
        if create:
            make_folder(folder)
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        owner = os.open(folder / _OWNER, flags, 0o600)
    except OSError as error:
        raise StoreError(f"no KV can be kept in {folder}: {_line(error)}") from error
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(owner)
        raise StoreBusy(f"another process keeps KV in {folder}") from None
    return owner


def _open(folder: Path, namespace: bytes, map_bytes: int, owner: int) -> Environment:
    if (folder / DATA).exists():
        if not trusted(folder):
            raise Untrusted("it was not synced before the system ended")
        if (folder / DATA).stat().st_size > map_bytes + RESERVE:
            raise Untrusted("it is larger than its budget")
        read_tree(folder, _BLOCKS, _INDEX)
    _mark(folder, _UNSURE, boot_id())  # before anything is written
    handle = lmdb.open(
        str(folder), map_size=map_bytes, max_dbs=3, sync=False, metasync=False, meminit=False, mode=0o600
    )
    try:
        check_content(handle, folder, namespace)
        handle.reader_check()
        environment = Environment(folder, handle, owner, writable=True)
        environment.delete_unindexed()
        return environment
    except BaseException:
        handle.close()
        raise


def check_content(handle: lmdb.Environment, folder: Path, namespace: bytes) -> None:
    """Raise unless the blocks here are of this format and namespace. A new environment becomes so."""
    if cut_off(handle, folder):
        raise Untrusted("its file is cut off")
    head = struct.pack("<I", VERSION) + namespace
    fresh = handle.info()["last_txnid"] == 0
    meta = handle.open_db(b"meta", create=fresh)
    with handle.begin(db=meta, write=fresh) as txn:
        if fresh:
            txn.put(_HEAD, head)
        elif txn.get(_HEAD) != head:
            raise Untrusted("it is of another model, other settings or another version")


def _trusted(folder: Path, boot: str) -> bool:
    try:
        words = (folder / _STATE).read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError):
        return False
    return words == [_SYNCED] or (bool(boot) and words == [_UNSURE, boot])


def _mark(folder: Path, state: str, boot: str) -> None:
    """Replace the state file at once, on the medium."""
    fresh = folder / (_STATE + ".new")
    with open(fresh, "w", encoding="ascii", opener=new_file) as file:
        file.write(f"{state} {boot}\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(folder / _STATE)
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _wipe(folder: Path) -> None:
    for name in (DATA, LOCK, _STATE):
        (folder / name).unlink(missing_ok=True)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
