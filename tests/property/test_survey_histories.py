"""Random histories of an LMDB, read without it: sound files are said to be sound, and give what LMDB has;
damaged ones are read to an end, without an error."""

from __future__ import annotations

import tempfile
from pathlib import Path

import lmdb
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.server.sessions.pages import PageFile
from agentserve.server.sessions.survey import Survey

TABLES = (b"a", b"b", b"c")
SIZES = (0, 1, 7, 100, 1500, 2030, 2040, 5000, 30000)
CHANGES = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 300), st.integers(0, 2), st.sampled_from(SIZES)),
    min_size=1,
    max_size=40,
)
HISTORY = st.lists(st.tuples(CHANGES, st.booleans()), min_size=1, max_size=25)
History = list[tuple[list[tuple[int, int, int, int]], bool]]


def write(path: Path, history: History) -> dict[tuple[bytes, bytes], bytes]:
    """What is in a file after a history of transactions, some of which were taken back."""
    env = lmdb.open(str(path), subdir=False, map_size=64 << 20, max_dbs=3, lock=False, sync=False)
    tables = [env.open_db(table) for table in TABLES]
    now: dict[tuple[bytes, bytes], bytes] = {}
    for number, (changes, kept) in enumerate(history):
        after = dict(now)
        with env.begin(write=True) as txn:
            for table, name, what, size in changes:
                key = b"name-%d" % name + b"-" * (name % 200)
                if what:
                    value = (b"%d %d %d " % (table, name, number) * (size // 5 + 1))[:size]
                    txn.put(key, value, db=tables[table])
                    after[TABLES[table], key] = value
                else:
                    txn.delete(key, db=tables[table])
                    after.pop((TABLES[table], key), None)
            if not kept:
                txn.abort()
        if kept:
            now = after
    env.close()
    return now


@settings(max_examples=60, deadline=None)
@given(HISTORY)
def test_a_sound_file_is_sound_and_gives_what_is_in_it(
    history: History,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.mdb"
        now = write(path, history)
        with PageFile(path) as file:
            assert file.head_problem() is None
            survey = Survey(file, file.metas[0])
            rows = list(survey.rows())
            assert survey.problems == []
            assert list(survey.strays()) == []
    assert {(table, name): value for table, name, value in rows} == now
    assert len(rows) == len(now)


@settings(max_examples=60, deadline=None)
@given(HISTORY, st.data())
def test_a_damaged_file_is_read_without_an_error(history: History, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.mdb"
        write(path, history)
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 8), label="places")):
            page = data.draw(st.integers(0, len(content) // 4096 - 1), label="page")
            at = page * 4096 + data.draw(st.one_of(st.integers(0, 40), st.integers(0, 4095)), label="at")
            junk = data.draw(st.binary(min_size=1, max_size=16), label="junk")
            content[at : at + len(junk)] = junk
        path.write_bytes(content[: data.draw(st.integers(0, len(content)), label="length")])
        with PageFile(path) as file:
            file.head_problem()
            for meta in (*file.metas, *file.roots()):
                survey = Survey(file, meta)
                count = sum(1 for _ in survey.rows()) + sum(1 for _ in survey.strays())
                assert count * 8 <= 2 * len(content)  # each page is read once, or twice
