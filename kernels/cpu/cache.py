"""Where compiled libraries are kept: whole or not at all, as long as somebody uses them.

Processes that start together wait for the first one's lock. A library is given out only if it is
what was kept, which the SHA-256 beside it tells: loading half a file kills.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kernels.cpu.compilers import FULL

log = logging.getLogger(__name__)

DAY = 24 * 3600.0
UNUSED = 30 * DAY  # seconds after which another library is removed
FOLDER = "agentserve-build-"  # how the names of folders begin that something is compiled in
_LEFT = (FOLDER, "tmp")  # how folders begin that a killed process leaves; "tmp": of earlier versions
_LIBRARY = re.compile(r"cpu-[\w-]+-[0-9a-f]{32}\.so")


@contextmanager
def usable_cache() -> Iterator[Path]:
    """The user's cache; where none can be written, a private folder that goes away after loading."""
    try:
        folder = Path.home() / ".cache" / "agentserve" / "kernels"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        writable = os.access(folder, os.W_OK)
    except (OSError, RuntimeError):  # RuntimeError: this user has no home
        writable = False
    if writable:
        yield folder
        return
    log.warning("no cache folder can be written: kernels are compiled at every start")
    with tempfile.TemporaryDirectory(prefix="agentserve-") as private:
        yield Path(private)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock; a full disk that has no room for one is no reason not to compile."""
    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            fcntl.flock(stack.enter_context(path.open("w")), fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in FULL:
                raise
        yield


def _digest_file(target: Path) -> Path:
    return target.with_name(target.name + ".sha256")


def _identity(library: Path) -> str:
    contents = library.read_bytes()
    return f"{len(contents)} {hashlib.sha256(contents).hexdigest()}\n"


def intact(target: Path) -> bool:
    """Whether the library is there, whole, and the one that was kept; notes that it is in use."""
    try:
        expected = _digest_file(target).read_bytes().decode("ascii", "replace")
        if not target.is_file() or not expected.startswith(f"{target.stat().st_size} "):
            return False
        if _identity(target) != expected:
            return False
    except OSError:
        return False
    with suppress(OSError):
        os.utime(target)
    return True


def keep(library: Path, target: Path) -> bool:
    """Copies a new library into the cache, its digest first; whether that worked."""
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=FOLDER) as folder:
            copy, identity = Path(folder) / "library.so", Path(folder) / "identity"
            shutil.copyfile(library, copy)
            identity.write_text(_identity(library))
            for path in (copy, identity):  # on the disk before it has its name
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            os.replace(identity, _digest_file(target))
            os.replace(copy, target)
    except OSError as error:
        reason = error.strerror or error
        log.warning("%s cannot be kept (%s): it is compiled at every start", target, reason)
        return False
    return True


def make_room(target: Path) -> None:
    """Removes the library that is not what it should be, and what nobody uses any more."""
    if target.exists():
        log.warning("%s is damaged or does not load: it is compiled again", target)
    for path in (target, _digest_file(target)):
        with suppress(OSError):
            path.unlink()
    now = time.time()
    with suppress(OSError):
        for path in target.parent.iterdir():
            with suppress(OSError):
                _remove_if_old(path, now)
    with suppress(OSError):
        for path in Path(tempfile.gettempdir()).glob(FOLDER + "*"):
            with suppress(OSError):
                _remove_if_old(path, now)


def _remove_if_old(path: Path, now: float) -> None:
    status = path.lstat()
    if status.st_uid != os.getuid():
        return
    if path.is_dir() and path.name.startswith(_LEFT) and now - status.st_mtime > DAY:
        shutil.rmtree(path, ignore_errors=True)
    elif _LIBRARY.fullmatch(path.name) and now - max(status.st_atime, status.st_mtime) > UNUSED:
        path.unlink()
        _digest_file(path).unlink(missing_ok=True)
