"""Asking peers moves no bytes: a question's steps are of so many keys, however large the blocks are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from agentserve.clock import WallClock
from tests.mover_rig import PATIENCE, Rig
from tiering.stores.mover import STEP_KEYS, Mover
from tiering.stores.peers import Peers
from tiering.types import Block, Move, Transfer


class Asked:
    def __init__(self, have: int) -> None:
        self.have = have
        self.asked: list[int] = []

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        self.asked.append(len(keys))
        return [int.from_bytes(key, "big") < self.have for key in keys]


def test_a_question_is_asked_in_steps_of_keys(tmp_path: Path) -> None:
    rig, peers = Rig(tmp_path / "kv"), Asked(STEP_KEYS + 3)
    mover = Mover(rig.pages, None, None, WallClock(), peers=cast(Peers, peers), step_bytes=1)
    keys = [number.to_bytes(32, "big") for number in range(3 * STEP_KEYS)]
    mover.submit(Transfer(1, Move.PROBE, tuple(Block(key, b"", b"") for key in keys)))
    while not (done := mover.poll()):
        pass
    assert mover.close(PATIENCE)
    assert sum(done[0].ok) == STEP_KEYS + 3
    assert peers.asked == [STEP_KEYS] * 2, "where there is a gap it ends"
    rig.mover.close(PATIENCE)
    rig.disk.close()
