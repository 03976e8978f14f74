"""Session files to damage, and a disk that fails where a test says."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import pytest

from agentserve.server.sessions.changes import Put, turn_name
from agentserve.server.sessions.environment import DATA, Table
from agentserve.server.sessions.pages import HEADER, NUMBER, PageFile, tree_at
from agentserve.server.sessions.store import SessionStore, Stored
from agentserve.server.sessions.survey import Survey

PAGE = 4096


def head(session: bytes, content: bytes = b"a head") -> Put:
    return Put(Table.HEADS, session, content)


def turn(session: bytes, number: int, content: bytes = b"a turn") -> Put:
    return Put(Table.TURNS, turn_name(session, number), content)


def session_name(number: int) -> bytes:
    return b"sess-%04d" % number


def filled(folder: Path, sessions: int = 40) -> dict[bytes, Stored]:
    """Make a file of sessions with two turns, the second on overflow pages. What is in it."""
    store = SessionStore(folder)
    for number in range(sessions):
        name = session_name(number)
        store.write([head(name, b"old"), turn(name, 1, b"%d" % number * 100)])
        store.write([head(name, name * 30), turn(name, 2, bytes([number]) * 9000)])
    found = store.read()
    store.close()
    return found


FIRST, OTHER = session_name(0), session_name(20)


@pytest.fixture(name="folder")
def fixture_folder(tmp_path: Path) -> Path:
    return tmp_path / "sessions"


@pytest.fixture(name="made", scope="module")
def fixture_made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[bytes, Stored]]:
    folder = tmp_path_factory.mktemp("made") / "sessions"
    return folder, filled(folder)


@pytest.fixture(name="whole")
def fixture_whole(folder: Path, made: tuple[Path, dict[bytes, Stored]]) -> dict[bytes, Stored]:
    """What is in the file of forty sessions that lies in `folder`."""
    source, found = made
    shutil.copytree(source, folder)
    return found


def intact(whole: dict[bytes, Stored], *but: bytes) -> dict[bytes, Stored]:
    return {name: stored for name, stored in whole.items() if name not in but}


def read(folder: Path) -> dict[bytes, Stored]:
    store = SessionStore(folder)
    try:
        return store.read()
    finally:
        store.close()


def data_of(folder: Path) -> bytes:
    return (folder / DATA).read_bytes()


def patch(folder: Path, at: int, content: bytes) -> None:
    """Change a file under whoever has it open, as a bad disk does."""
    with (folder / DATA).open("r+b") as file:
        file.seek(at)
        file.write(content)


def swap(folder: Path, one: int, other: int) -> None:
    """Exchange two pages."""
    data = data_of(folder)
    patch(folder, one * PAGE, data[other * PAGE : other * PAGE + PAGE])
    patch(folder, other * PAGE, data[one * PAGE : one * PAGE + PAGE])


def leaf_of(folder: Path, table: Table, name: bytes) -> int:
    """The page that a record is on, or the number of its overflow page is."""
    return _place_of(folder, table, name)[0]


def overflow_of(folder: Path, table: Table, name: bytes) -> int:
    """The first of the pages that a large record has for itself."""
    return _place_of(folder, table, name)[1]


def _place_of(folder: Path, table: Table, name: bytes) -> tuple[int, int]:
    with PageFile(folder / DATA) as file:
        survey = Survey(file, file.metas[0])
        trees = dict(survey._entries(file.metas[0].main, tables=True))
        tree = tree_at(trees[table.value], 0)
        for page, node in survey._leaves(tree.root, tree.depth, b"", None, False):
            if node.name == name:
                return HEADER.unpack_from(page)[0], NUMBER.unpack_from(page, node.at)[0]
    raise AssertionError(f"no {name!r} in {table}")


class FailingDisk:
    """`lmdb.open`, but transactions end in an error where a test says so."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.opened = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.opened += 1
        return _Env(lmdb.open(*args, **kwargs), self)


class _Env:
    def __init__(self, env: Any, plan: FailingDisk) -> None:
        self._env, self._plan = env, plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    @contextmanager
    def begin(self, write: bool = False, buffers: bool = False) -> Iterator[Any]:
        with self._env.begin(write=write, buffers=buffers) as txn:
            yield txn
            if write and self._plan.error is not None:
                raise self._plan.error
