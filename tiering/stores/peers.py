"""Blocks in the environments of this machine's other workers: found and read, never written.

A peer writes, dies, comes back, starts afresh or is deleted whenever it likes. Each read is one short
transaction, entered in LMDB's table of readers, so that the pages it sees are not used again meanwhile;
and what it gives is verified like a read of one's own. Whatever is odd is a miss. Nothing is ever deleted
here: a bad block is its owner's to find.

A folder is opened only while it is trusted (`environment`), and one file with the lock beside it: a file
that was started afresh behind our back has another table of readers. A deleted one serves on as it was,
for nobody writes there any more, until it is noticed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import lmdb
import numpy as np

from tiering.stores.buffers import Bytes
from tiering.stores.disk_format import Distrust, Reader
from tiering.stores.environment import DATA, LOCK, RESERVE, Untrusted, check_content, trusted, worker_folders
from tiering.stores.faults import DISK_READ, Fault, no_fault
from tiering.types import Block

log = logging.getLogger(__name__)

NOT_THERE = "no peer has it"
_TREE_IS_BROKEN = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError, lmdb.InvalidError)


@dataclass(slots=True, eq=False)
class _Peer:
    """A peer's environment, open for reading."""

    folder: Path
    file: int  # a descriptor of its data: as long as it is open, no other file has its number
    handle: lmdb.Environment
    blocks: lmdb._Database
    index: lmdb._Database

    @property
    def current(self) -> bool:
        """Whether its file is still the one in the folder, and to be trusted."""
        try:
            return os.fstat(self.file).st_nlink > 0 and trusted(self.folder)
        except OSError:
            return False

    def close(self) -> None:
        self.handle.close()
        os.close(self.file)


class Peers:
    """The other workers' folders in `data_dir`. For one thread at a time; no call raises LMDB's or the
    system's errors.

    own: this worker's folders, the adopted ones too: LMDB must not open a file twice in a process.
    budget: the most that a peer keeps, in bytes.
    """

    def __init__(
        self,
        data_dir: Path,
        own: Callable[[], Sequence[Path]],
        namespace: bytes,
        budget: int,
        block_bytes: int,
        *,
        fault: Fault = no_fault,
    ) -> None:
        self._data_dir = data_dir
        self._own = own
        self._namespace = namespace
        self._map_bytes = budget + RESERVE
        self._reader = Reader(block_bytes)
        self._fault = fault
        self._open: dict[Path, _Peer] = {}
        self._complained: set[Path] = set()
        self._broken: dict[Path, int] = {}  # folders with a broken tree, and in which file
        self.distrusted = 0  # blocks that could not be believed

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of a sequence of blocks peers have, up to the first that none has; reads no values."""
        found = [False] * len(keys)
        peers, left, before = self._peers(), 0, -1
        while before < left < len(keys):  # each goes on where the one before it ended, as long as one can
            before = left
            for peer in list(peers):
                try:
                    self._fault(DISK_READ, None)
                    with peer.handle.begin(db=peer.index) as txn:
                        while left < len(keys) and txn.get(keys[left]) is not None:
                            found[left] = True
                            left += 1
                except (lmdb.Error, OSError) as error:
                    peers.remove(peer)
                    self._drop(peer, error)
        return found

    def fetch(self, block: Block, take: Callable[[Bytes], None], *, look: bool = True) -> str:
        """Give the verified bytes of `block` to `take`; they are there until it returns. Returns why not,
        else "". What `take` raises passes. look: first see who may be read, which the next blocks of one
        step need not. (`find` looks for new folders; this only if it knows none.)"""
        reason = NOT_THERE
        for peer in (self._known() or self._peers()) if look else list(self._open.values()):
            try:
                self._fault(DISK_READ, None)
                found = self._read(peer, block, take)
            except (lmdb.Error, OSError) as error:
                self._drop(peer, error)
                continue
            if not found:
                return ""
            reason = found if reason == NOT_THERE else reason
        return reason

    def _read(self, peer: _Peer, block: Block, take: Callable[[Bytes], None]) -> str:
        with peer.handle.begin(db=peer.blocks, buffers=True) as txn:
            value = txn.get(block.key)
            if value is None:
                return NOT_THERE
            verdict = self._reader.payload(block, np.frombuffer(value, dtype=np.uint8))
            if not isinstance(verdict, Distrust):
                take(verdict)
                return ""
        self.distrusted += 1
        log.warning("a block of a peer, in %s, is not used: %s", peer.folder, verdict.reason)
        return verdict.reason

    # --- which there are -----------------------------------------------------------------------

    def _known(self) -> list[_Peer]:
        """Those that are open and may still be read."""
        for peer in list(self._open.values()):
            if not peer.current:
                self._drop(peer)
        return list(self._open.values())

    def _peers(self) -> list[_Peer]:
        """Those that can be read now."""
        own = {folder.absolute() for folder in self._own()}
        folders = [folder for folder in worker_folders(self._data_dir) if folder.absolute() not in own]
        for peer in self._known():
            if peer.folder not in folders:
                self._drop(peer)
        for folder in folders:
            if folder not in self._open:
                self._try_to_open(folder)
        return [self._open[folder] for folder in folders if folder in self._open]

    def _try_to_open(self, folder: Path) -> None:
        try:
            file = (folder / DATA).stat().st_ino
            if not trusted(folder) or self._broken.get(folder) == file:
                return
            self._open[folder] = self._opened(folder)
            self._complained.discard(folder)
        except (lmdb.Error, OSError, Untrusted) as error:
            if folder not in self._complained:  # it is tried again whenever a block is looked for
                self._complained.add(folder)
                log.info("a peer's KV in %s is not read: %s", folder, " ".join(str(error).split()))

    def _opened(self, folder: Path) -> _Peer:
        with ExitStack() as undo:
            file = os.open(folder / DATA, os.O_RDONLY | os.O_CLOEXEC)
            undo.callback(os.close, file)
            lock = (folder / LOCK).stat().st_ino  # not to be opened: closing it would end LMDB's own locks
            handle = lmdb.open(str(folder), map_size=self._map_bytes, readonly=True, create=False, max_dbs=3)
            undo.callback(handle.close)
            check_content(handle, folder, self._namespace)
            blocks, index = (handle.open_db(name, create=False) for name in (b"blocks", b"index"))
            peer = _Peer(folder, file, handle, blocks, index)
            same = os.fstat(file).st_ino == (folder / DATA).stat().st_ino
            if not (same and (folder / LOCK).stat().st_ino == lock and peer.current):
                raise Untrusted("it is being started afresh")
            undo.pop_all()
            return peer

    def _drop(self, peer: _Peer, error: Exception | None = None) -> None:
        if error is not None:
            log.info("a peer's KV in %s is left: %s", peer.folder, " ".join(str(error).split()))
            if isinstance(error, _TREE_IS_BROKEN):
                self._broken[peer.folder] = os.fstat(peer.file).st_ino
        self._open.pop(peer.folder, None)
        peer.close()

    def close(self) -> None:
        """Let go of everything. Idempotent; what is asked afterwards opens anew."""
        for peer in list(self._open.values()):
            self._drop(peer)
