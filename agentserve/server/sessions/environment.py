"""The LMDB of a server's sessions as a file: its tables, how it is opened, and whether it is sound.

LMDB believes its pages: where they are damaged it may give an error, or end the process. So a child
process walks the environment first; where that fails, the environment is replaced, and what a second
child could read until then goes into the new one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

import lmdb

FIRST_MAP = 64 << 20  # bytes of address space; doubled when full, so the disk is the limit
DATA = "data.mdb"

_DAMAGED = 3  # how the child exits
_DAMAGE = (
    lmdb.InvalidError,
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
    lmdb.PanicError,
    lmdb.BadTxnError,
    lmdb.BadDbiError,
    lmdb.IncompatibleError,
    lmdb.NotFoundError,
    lmdb.ProblemError,
)

Open = Callable[..., Any]
"""As `lmdb.open`."""


class Table(Enum):
    META = b"meta"
    HEADS = b"heads"
    TURNS = b"turns"
    WORDS = b"words"  # transcripts
    DAMAGED = b"damaged"


Record = tuple[Table, bytes, bytes]


def attach(folder: Path, opener: Open, map_size: int) -> tuple[Any, dict[Table, Any]]:
    """Open an environment without locks of its own, and its tables. lmdb.Error."""
    env = opener(str(folder), map_size=map_size, max_dbs=len(Table), mode=0o600, lock=False)
    try:
        # A file that was cut is filled up: what is missing then reads as damage, and is no bus error.
        size = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
        if (folder / DATA).stat().st_size < size:
            os.truncate(folder / DATA, size)
        return env, {table: env.open_db(table.value) for table in Table}
    except BaseException:
        env.close()
        raise


def damage(folder: Path) -> str | None:
    """Why an environment cannot be read and written, in one line; None: it can, or there is none."""
    if not (folder / DATA).exists():
        return None
    child = subprocess.run(_command(folder, "walk"), capture_output=True, check=False)
    if child.returncode < 0:
        return signal.Signals(-child.returncode).name
    if child.returncode == _DAMAGED:
        return child.stderr.decode("utf-8", "replace").strip()
    return None  # what else went wrong is no damage; the server will meet it, too


def salvaged(folder: Path) -> list[Record]:
    """What can be read of a damaged environment."""
    child = subprocess.run(
        _command(folder, "dump"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
    )
    return list(_records(child.stdout))


def _command(folder: Path, task: str) -> list[str]:
    return [sys.executable, "-P", "-m", __name__, task, str(folder)]


def _main(task: str, folder: Path) -> int:
    """The child."""
    try:
        _walk(folder, sys.stdout.buffer if task == "dump" else None)
    except _DAMAGE as error:
        sys.stderr.write(" ".join(str(error).split()))
        return _DAMAGED
    return 0


def _walk(folder: Path, out: BinaryIO | None) -> None:
    """Every record once, then a write that is not kept."""
    env, tables = attach(folder, lmdb.open, FIRST_MAP)
    left = (folder / DATA).stat().st_size // 8
    with env.begin() as txn:
        for table in (Table.HEADS, Table.TURNS, Table.WORDS):
            with txn.cursor(tables[table]) as cursor:
                for name, sealed in cursor:
                    left -= 1
                    if left < 0:  # pages that lead to each other have no end
                        raise lmdb.CorruptedError("more records than there is room for")
                    if out is not None:
                        _dump(out, table, name, sealed)
    txn = env.begin(write=True)
    for table in Table:
        for number in range(8):
            txn.put(b"%d" % number, bytes(4000 * number), db=tables[table])
    txn.abort()


def _dump(out: BinaryIO, table: Table, name: bytes, sealed: bytes) -> None:
    for part in (table.value, name, sealed):
        out.write(len(part).to_bytes(8, "little") + part)
    out.flush()


def _records(dumped: bytes) -> Iterator[Record]:
    """The whole records of a dump that may end anywhere."""
    parts: list[bytes] = []
    at = 0
    while at + 8 <= len(dumped):
        length = int.from_bytes(dumped[at : at + 8], "little")
        if at + 8 + length > len(dumped):
            return
        parts.append(dumped[at + 8 : at + 8 + length])
        at += 8 + length
        if len(parts) == 3:
            yield Table(parts[0]), parts[1], parts[2]
            parts = []


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], Path(sys.argv[2])))
