"""Files for their owner alone: KV and sessions are what users said."""

from __future__ import annotations

import os
import stat
from pathlib import Path

FOLDER, FILE = 0o700, 0o600


def make_folder(folder: Path) -> None:
    """A folder and those above it that are missing. One that is there stays as it is. OSError."""
    missing = [path for path in folder.parents if not path.exists()]
    for path in (*reversed(missing), folder):
        path.mkdir(mode=FOLDER, exist_ok=True)


def new_file(path: str | Path, flags: int) -> int:
    """An `opener` for `open`."""
    return os.open(path, flags | os.O_CLOEXEC, FILE)


def close_to_others(root: Path) -> None:
    """A folder and all below it, as an earlier version made them. Links are not followed; what is another
    user's stays."""
    for folder, _, files in os.walk(root):
        for path in (folder, *(os.path.join(folder, name) for name in files)):
            _close(path)


def _close(path: str) -> None:
    try:
        found = os.lstat(path)
        open_to_others = stat.S_IMODE(found.st_mode) & 0o077
        if open_to_others and found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode):
            os.chmod(path, stat.S_IMODE(found.st_mode) & 0o700)
    except OSError:  # it is gone meanwhile, or on a medium that cannot
        return
