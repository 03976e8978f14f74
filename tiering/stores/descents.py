"""Getting LMDB's own pages into memory before its values are read.

The system reads ahead around every page of a map that is touched for the first time: right for a
value, whose pages follow each other, and wrong for the pages of the tree, which lie all over the file.
Each would bring megabytes of neighbours, and the reader of values would wait for them in between: a
cold read of values was measured to take half as long again. So the tree is read first, page by page.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import lmdb


def read_tree(folder: Path, values: bytes, index: bytes) -> None:
    """Read the pages of both databases' trees, and no value of `values`; the keys of `index` name those.

    The folder is not open in this process. What is wrong with it is for others to find: here it only
    ends the reading. A file that is cut off is not read.
    """
    with (
        contextlib.suppress(lmdb.Error, OSError),
        # Without readahead the system brings the page that is asked for, and no other.
        lmdb.open(str(folder), readonly=True, lock=False, readahead=False, max_dbs=3) as handle,
    ):
        if cut_off(handle, folder):
            return
        named = handle.open_db(index, create=False)
        large = handle.open_db(values, create=False)
        with handle.begin(db=large) as txn:
            for key in txn.cursor(named).iternext(keys=True, values=False):
                txn.get(_beside(key))


def cut_off(handle: lmdb.Environment, folder: Path) -> bool:
    """Whether the file is shorter than its tree says: reading there would end the process."""
    info, page = handle.info(), handle.stat()["psize"]
    written = (folder / "data.mdb").stat().st_size
    return bool(written < (info["last_pgno"] + 1) * page and info["last_txnid"] > 0)


def _beside(key: bytes) -> bytes:
    """A key that is looked for where `key` is, and is not there (keys are digests): LMDB touches the first
    page of every value that it finds."""
    return key[:-1] + bytes([key[-1] ^ 1])
