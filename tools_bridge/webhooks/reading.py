"""Reads an LMDB file in a process of its own: LMDB ends its process at some damaged pages.

What could be read comes back, whatever becomes of the child. A file is whole if the child says so at the
end.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import lmdb

COMMAND = (sys.executable, "-P", "-m", "tools_bridge.webhooks.reading")
SECONDS = 120.0
_FRAME = struct.Struct("<BII")  # table, bytes of the name, of the content
_END = b"\xff whole"

Row = tuple[bytes, bytes, bytes]
"""Table, name, content."""


def read_file(path: Path, tables: Iterable[bytes], seconds: float = SECONDS) -> tuple[list[Row], bool]:
    """All rows that could be read, and whether those are all. OSError if no process can be started."""
    names = list(tables)
    texts = [name.decode() for name in names]
    try:
        done = subprocess.run(
            [*COMMAND, str(path), *texts],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=seconds,
            check=False,
            start_new_session=True,  # an interrupt at the terminal is for the server
        )
        told, ended = done.stdout, done.returncode == 0
    except subprocess.TimeoutExpired as late:  # pages in a circle
        told, ended = late.stdout or b"", False
    rows, whole = _rows(told, names)
    return rows, whole and ended


def _rows(told: bytes, names: list[bytes]) -> tuple[list[Row], bool]:
    rows: list[Row] = []
    at, most = 0, len(told)
    while at + _FRAME.size <= most:
        if told.startswith(_END, at):
            return rows, at + len(_END) == most
        table, name_size, size = _FRAME.unpack_from(told, at)
        start = at + _FRAME.size
        at = start + name_size + size
        if at > most or table >= len(names):
            return rows, False
        rows.append((names[table], told[start : start + name_size], told[start + name_size : at]))
    return rows, told[at:] == _END


def write_rows(path: str, tables: list[str], out: BinaryIO) -> None:
    """lmdb.Error, ValueError, or the end of the process, where the file is damaged."""
    env = lmdb.open(path, subdir=False, readonly=True, lock=False, max_dbs=len(tables))
    with env.begin() as txn:
        for number, name in enumerate(tables):
            table = env.open_db(name.encode(), txn=txn, create=False)
            count, last = 0, b""
            with txn.cursor(table) as cursor:
                for key, value in cursor:
                    out.write(_FRAME.pack(number, len(key), len(value)) + key + value)
                    if key <= last:
                        raise ValueError("rows out of order: a page is not where it was written")
                    count, last = count + 1, key
            if count != txn.stat(table)["entries"]:
                raise ValueError("rows are missing")
    out.write(_END)
    out.flush()


if __name__ == "__main__":
    write_rows(sys.argv[1], sys.argv[2:], sys.stdout.buffer)
