"""Two processes over one data directory: one writes its blocks, dies, starts afresh or goes away, while the
other reads them. What is read is right or a miss, and the writer never notices."""

from __future__ import annotations

import random
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from agentserve.clock import WallClock
from tests.kv_blocks import BLOCK_BYTES, BUDGET, NAMESPACE, chain, content
from tiering.stores.environment import distrust, worker_folder
from tiering.stores.mover import Mover
from tiering.stores.pages import PoolPages
from tiering.stores.peers import NOT_THERE, Peers
from tiering.types import Block, Move, Transfer

pytestmark = pytest.mark.process

BLOCKS = chain(40)
ROOMY = 32 * BUDGET  # what is freed while the system holds up a reader in its transaction stays: room for all
OWNER = """
import random, sys
from pathlib import Path
from tests.kv_blocks import chain, open_store, put
namespace = bytes.fromhex(sys.argv[2])
store, blocks = open_store(Path(sys.argv[1]), namespace, int(sys.argv[3])), chain(40)
print("ready", flush=True)
for line in sys.stdin:
    word, first, last = line.split()
    some = blocks[int(first):int(last)]
    if word == "put":
        assert all(put(store, some)), "refused"
    elif word == "delete":
        store.delete_many([block.key for block in some])
    elif word == "churn":
        choose = random.Random(int(first))
        for turn in range(int(last)):
            few = choose.sample(blocks, 8)
            if turn % 2:
                assert all(put(store, few)), "refused"
            else:
                store.delete_many([block.key for block in few])
    print("done", flush=True)
store.close()
"""


class Owner:
    """A worker's process, as far as its disk goes."""

    def __init__(self, folder: Path, namespace: bytes = NAMESPACE, budget: int = ROOMY) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(folder), namespace.hex(), str(budget)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.expect("ready")

    def expect(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == word + "\n"

    def tell(self, word: str, first: int, last: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word} {first} {last}\n")
        self.process.stdin.flush()

    @property
    def busy(self) -> bool:
        """Whether it has not done yet what it was told."""
        return not select.select([self.process.stdout], [], [], 0)[0]

    def do(self, word: str, first: int, last: int) -> None:
        self.tell(word, first, last)
        self.expect("done")

    def kill(self) -> None:
        self.process.kill()
        self._end()

    def close(self) -> None:
        assert self.process.stdin is not None
        if not self.process.stdin.closed:
            self.process.stdin.close()
            assert self.process.wait(60) == 0
            self._end()

    def _end(self) -> None:
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def peers_of(data_dir: Path) -> Peers:
    """What worker 0 sees of the others."""
    return Peers(data_dir, lambda: (worker_folder(data_dir, 0),), NAMESPACE, ROOMY, BLOCK_BYTES)


def read(peers: Peers, block: Block) -> bool:
    """Whether a peer gave the block; fails if it gave wrong bytes."""
    got: list[bytes] = []
    reason = peers.fetch(block, lambda payload: got.append(payload.tobytes()))
    assert bool(reason) == (not got)
    assert not got or got[0] == content(block).tobytes(), "wrong bytes were believed"
    return not reason


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    with closing(Owner(worker_folder(tmp_path, 1))) as owner:
        yield owner


def test_what_a_peer_writes_is_found_and_read_while_it_lives(tmp_path: Path, owner: Owner) -> None:
    keys = [block.key for block in BLOCKS]
    with closing(peers_of(tmp_path)) as peers:
        assert peers.find(keys) == [False] * 40
        owner.do("put", 0, 10)
        assert peers.find(keys) == [True] * 10 + [False] * 30
        assert all(read(peers, block) for block in BLOCKS[:10])
        owner.do("put", 20, 30)
        assert sum(peers.find(keys)) == 10, "as far as there is no gap"
        assert all(read(peers, block) for block in BLOCKS[20:30])
        owner.do("delete", 3, 5)
        assert peers.find(keys) == [True] * 3 + [False] * 37
        assert peers.fetch(BLOCKS[3], lambda _: None) == NOT_THERE
        assert peers.distrusted == 0
        assert peers.find([]) == []


def test_several_peers_give_one_run(tmp_path: Path, owner: Owner) -> None:
    with closing(Owner(worker_folder(tmp_path, 2))) as second, closing(peers_of(tmp_path)) as peers:
        owner.do("put", 0, 4)
        second.do("put", 2, 9)
        assert sum(peers.find([block.key for block in BLOCKS])) == 9
        assert all(read(peers, block) for block in BLOCKS[:9])
    with closing(peers_of(tmp_path)) as peers:
        assert all(read(peers, block) for block in BLOCKS[:9]), "one that has ended is read as well"


def test_peers_that_have_parts_in_turn_give_one_run(tmp_path: Path, owner: Owner) -> None:
    with closing(Owner(worker_folder(tmp_path, 2))) as second, closing(peers_of(tmp_path)) as peers:
        for at in range(0, 12, 4):
            owner.do("put", at + 2, at + 4)
            second.do("put", at, at + 2)
        assert peers.find([block.key for block in BLOCKS]) == [True] * 12 + [False] * 28


def test_who_may_be_read_is_looked_at_once_per_step(
    tmp_path: Path, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner.do("put", 0, 8)
    looks = []
    with closing(peers_of(tmp_path)) as peers:
        known = peers._known

        def look() -> list[Any]:
            looks.append(1)
            return known()

        monkeypatch.setattr(peers, "_known", look)
        assert peers.fetch(BLOCKS[0], lambda _: None) == ""
        seen = len(looks)
        assert [peers.fetch(block, lambda _: None, look=False) for block in BLOCKS[1:8]] == [""] * 7
        assert len(looks) == seen
        assert distrust(worker_folder(tmp_path, 1))
        assert peers.fetch(BLOCKS[0], lambda _: None) == NOT_THERE


def test_a_writer_at_full_speed_and_its_readers_do_not_hurt_each_other(tmp_path: Path, owner: Owner) -> None:
    owner.do("put", 0, 40)
    choose, hits, misses = random.Random(1), 0, 0
    with closing(peers_of(tmp_path)) as peers:
        owner.tell("churn", 7, 300)
        while owner.busy or hits < 100 or not misses:
            if read(peers, choose.choice(BLOCKS)):
                hits += 1
            else:
                misses += 1
        owner.expect("done")
        assert peers.distrusted == 0, "a short transaction sees one state"


def test_a_peer_may_be_killed_at_any_moment_and_starts_again_beside_its_readers(tmp_path: Path) -> None:
    choose, hits = random.Random(2), 0
    with closing(peers_of(tmp_path)) as peers:
        for kill in range(8):
            owner = Owner(worker_folder(tmp_path, 1))
            owner.do("put", 0, 40)
            owner.tell("churn", kill, 10**6)
            for _ in range(choose.randrange(5, 60)):
                hits += read(peers, choose.choice(BLOCKS))
            owner.kill()
            hits += sum(read(peers, block) for block in BLOCKS)
        assert peers.distrusted == 0
    assert hits > 8 * 10


def test_a_reader_killed_in_a_read_keeps_no_room(tmp_path: Path) -> None:
    """Its place in the table of readers is taken back when the writer needs what it held."""
    with closing(Owner(worker_folder(tmp_path, 1), budget=BUDGET)) as owner:
        owner.do("put", 0, 40)
        reader = subprocess.Popen(
            [sys.executable, "-c", HANGING_READER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reading\n"
        reader.kill()
        reader.wait()
        reader.stdout.close()
        for seed in range(4):
            owner.do("churn", seed, 60)  # refuses nothing, though its budget holds little more than one state
        owner.do("put", 0, 40)
        with closing(peers_of(tmp_path)) as peers:
            assert all(read(peers, block) for block in BLOCKS)


HANGING_READER = """
import sys, time
from pathlib import Path
from tests.process.test_disk_peers import BLOCKS, peers_of
def hang(payload):
    print("reading", flush=True)
    time.sleep(1000)
peers_of(Path(sys.argv[1])).fetch(BLOCKS[0], hang)
"""


def test_a_folder_that_goes_away_in_a_read_is_a_miss_afterwards_and_comes_back(tmp_path: Path) -> None:
    folder = worker_folder(tmp_path, 1)
    with closing(peers_of(tmp_path)) as peers:
        with closing(Owner(folder)) as owner:
            owner.do("put", 0, 40)
            seen: list[bytes] = []

            def take(payload) -> None:  # type: ignore[no-untyped-def]
                shutil.rmtree(folder)
                seen.append(payload.tobytes())

            assert peers.fetch(BLOCKS[0], take) == ""
            assert seen == [content(BLOCKS[0]).tobytes()]
            assert not read(peers, BLOCKS[1])
            owner.kill()
        assert peers.find([BLOCKS[1].key]) == [False]
        with closing(Owner(folder)) as owner:
            owner.do("put", 1, 2)
            assert read(peers, BLOCKS[1])


def test_what_is_not_to_be_trusted_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine, foreign, crashed = (worker_folder(tmp_path, number) for number in (0, 1, 2))
    for folder, namespace in ((mine, NAMESPACE), (foreign, b"o" * 32), (crashed, NAMESPACE)):
        with closing(Owner(folder, namespace)) as owner:
            owner.do("put", 0, 5)
    with closing(peers_of(tmp_path)) as peers:
        assert read(peers, BLOCKS[0])
        assert distrust(crashed)
        with caplog.at_level("INFO"):
            assert not any(read(peers, block) for block in BLOCKS[:5])
        assert len(caplog.records) == 0, "said once, before"
    with closing(Owner(crashed)) as owner, closing(peers_of(tmp_path)) as peers:
        assert not read(peers, BLOCKS[0]), "it was started afresh"
        owner.do("put", 0, 1)
        assert read(peers, BLOCKS[0])


def test_a_bad_block_is_a_miss_and_left_to_its_owner(tmp_path: Path) -> None:
    folder = worker_folder(tmp_path, 1)
    with closing(Owner(folder)) as owner:
        owner.do("put", 0, 5)
    data = folder / "data.mdb"
    raw = data.read_bytes()
    at = raw.index(content(BLOCKS[2]).tobytes()[:100])
    data.write_bytes(raw[: at + 5] + bytes([raw[at + 5] ^ 1]) + raw[at + 6 :])
    with closing(peers_of(tmp_path)) as peers:
        assert [read(peers, block) for block in BLOCKS[:5]] == [True, True, False, True, True]
        assert "checksum" in peers.fetch(BLOCKS[2], lambda _: None)
        assert peers.distrusted == 2
    assert sum(data.read_bytes()[at + 5 : at + 6]) == raw[at + 5] ^ 1


def test_the_mover_answers_what_peers_have_and_brings_it(tmp_path: Path) -> None:
    with closing(Owner(worker_folder(tmp_path, 1))) as owner, closing(peers_of(tmp_path)) as peers:
        owner.do("put", 0, 6)
        owner.do("put", 8, 10)
        pool = torch.zeros((40, BLOCK_BYTES), dtype=torch.uint8)
        mover = Mover(PoolPages([pool]), None, None, WallClock(), peers=peers, step_bytes=3 * BLOCK_BYTES)

        def moved(number: int, move: Move, blocks: list[Block]) -> tuple[bool, ...]:
            mover.submit(Transfer(number, move, tuple(blocks), urgent=True))
            assert select.select([mover.fileno()], [], [], 60)[0]
            (done,) = mover.poll()
            return done.ok

        assert moved(1, Move.PROBE, BLOCKS) == (True,) * 6 + (False,) * 34
        assert moved(2, Move.PROBE, BLOCKS[8:]) == (True,) * 2 + (False,) * 30
        assert moved(3, Move.BORROW, BLOCKS[:7]) == (True,) * 6 + (False,)
        for number, block in enumerate(BLOCKS[:6]):
            assert pool[number].numpy().tobytes() == content(block).tobytes()
        assert mover.close(60)
