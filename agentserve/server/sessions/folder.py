"""The folder that sessions are kept in: whose it is, and that what is in it is there after a crash."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from tiering.stores.private import make_folder, new_file

MOST_KEPT = 4  # damaged files


@dataclass(frozen=True, slots=True)
class Place:
    """Which file lies at a path, and its size in bytes."""

    device: int
    number: int
    size: int

    def is_file(self, other: Place) -> bool:
        return (self.device, self.number) == (other.device, other.number)


def place_of(path: Path) -> Place | None:
    """None: there is nothing. OSError: what is there is no file, or a link to nothing, which may be a disk
    that is not mounted yet: nothing is to take its place."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        _no_link_to_nothing(path)
        return None
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path.name} is not a file")
    return Place(found.st_dev, found.st_ino, found.st_size)


def _no_link_to_nothing(path: Path) -> None:
    if path.is_symlink():
        raise OSError(f"{path} is a link to something that is not there")


def make(folder: Path) -> None:
    """The folder, for its owner alone (it holds what users said), and synced into its parents."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in missing:
        _no_link_to_nothing(path)
    make_folder(folder)
    for path in missing:
        sync(path.parent)


def locked(folder: Path) -> int:
    """A descriptor that keeps other servers out while it is open. ValueError where one is in; it names its
    process, where that has written its number into the file."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = _pid_in(lock)
        os.close(lock)
        whose = f"another server (pid {pid})" if pid else "another server"
        raise ValueError(f"{folder}: {whose} has these sessions open") from None
    except OSError:
        os.close(lock)
        raise
    with contextlib.suppress(OSError):  # it only helps who is kept out
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode("ascii"), 0)
    return lock


def _pid_in(lock: int) -> str:
    try:
        said = os.pread(lock, 20, 0).decode("ascii", "replace")
    except OSError:
        return ""
    return said if said.isascii() and said.isdecimal() else ""


def holds(lock: int, folder: Path) -> bool:
    """Whether a lock is still the one that another server would meet."""
    held, there = os.fstat(lock), place_of(folder / "lock")
    return there is not None and (held.st_dev, held.st_ino) == (there.device, there.number)


def sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def keep_aside(data: Path) -> Path:
    """Give a damaged file a second name beside it, `damaged-<n>.mdb`: the one that takes its place is then
    renamed onto it, and there is no moment without one. Of many, the oldest go. OSError."""
    numbers = sorted(int(path.stem[8:]) for path in kept_aside(data.parent) if path.stem[8:].isdecimal())
    for number in numbers[: max(0, len(numbers) + 1 - MOST_KEPT)]:
        _damaged(data.parent, number).unlink(missing_ok=True)
    path = _damaged(data.parent, numbers[-1] + 1 if numbers else 1)
    try:
        os.link(data, path)
    except OSError:  # a file system without hard links
        with data.open("rb") as old, open(path, "wb", opener=new_file) as copy:
            shutil.copyfileobj(old, copy)
    return path


def _damaged(folder: Path, number: int) -> Path:
    return folder / f"damaged-{number}.mdb"


def kept_aside(folder: Path) -> list[Path]:
    """Damaged files, which are for the operator to look at and to remove."""
    return sorted(folder.glob("damaged-*.mdb"))
