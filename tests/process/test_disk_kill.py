"""`kill -9` of a process that writes and deletes blocks, at random moments: LMDB opens every time."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.kv_blocks import chain, fetched, has, open_store

pytestmark = pytest.mark.process

KILLS = 20
WRITER = """
import random, sys
from pathlib import Path
from tests.kv_blocks import chain, open_store, put
store, blocks = open_store(Path(sys.argv[1])), chain(120)
choose = random.Random(int(sys.argv[2]))
print("writing", flush=True)
for turn in range(10**9):
    some = choose.sample(blocks, 12)
    if turn % 3 < 2:
        done = [block.slot for block, ok in zip(some, put(store, some)) if ok]
        print("+", *done, flush=True)
    else:
        store.delete_many([block.key for block in some])
        print("-", *(block.slot for block in some), flush=True)
"""


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """What a committed transaction wrote and no later one deleted is there, and nothing wrong ever is."""
    blocks, choose = chain(120), random.Random(4)
    present: set[int] = set()
    grown = 0
    for kill in range(KILLS):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(kill)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        told = "".join(writer.stdout.readline() for _ in range(choose.randrange(25)))
        time.sleep(choose.random() * 0.003)  # anywhere within the next transactions
        writer.kill()
        told += writer.stdout.read()
        writer.stdout.close()
        writer.wait()
        lines = told.splitlines(keepends=True)
        for line in lines:
            if line.endswith("\n"):
                sign, *numbers = line.split()
                named = {int(number) for number in numbers}
                present = present | named if sign == "+" else present - named
        grown += len(lines)
        # The last transaction may have been committed and not told.
        store = open_store(tmp_path)
        entries = {entry.key for entry in store.entries()}
        found = {block.slot for block in blocks if block.key in entries}
        assert len(found ^ present) <= 12
        assert all(has(store, blocks[slot]) for slot in found)
        assert not any(has(store, block) for block in blocks if block.slot not in found)
        assert store.take_faults() == ()
        store.close()
        present = found
    assert grown > 5 * KILLS
    store = open_store(tmp_path)
    assert fetched(store, chain(1, first=10**6)[0]) == "missing on disk"
    store.close()
