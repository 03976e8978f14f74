"""What can go wrong with KV on disk, done to the real server and the real model: never a wrong token,
never a turn that waits for the disk, and each fault counted once."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from agentserve.models.source import resolve
from tests.process.disk_damage import Damage
from tests.process.test_proc_launch import until
from tests.process.test_proc_tiers import at_rest, totals
from tests.process.tier_life import AGENTS, Life, Said, agents, life

pytestmark = [pytest.mark.process, pytest.mark.model]

AT = 3  # which of a run's own blocks is damaged: not its first, not its last


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Said]:
    """The folder of a server that was killed, with KV of five agents on disk, and what it said."""
    folder = tmp_path_factory.mktemp("before")
    root = str(Path(__file__).parent.parent.parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))))
        with life(folder) as first:
            said = agents(first.client)
            assert first.faults() == {}
            first.kill()
    return folder, said


@pytest.fixture
def folder(before: tuple[Path, Said], tmp_path: Path) -> Path:
    """A copy of that folder."""
    shutil.copytree(before[0] / "data", tmp_path / "data")
    return tmp_path


@pytest.fixture
def plain(before: tuple[Path, Said]) -> Said:
    return before[1]


def flipped(damage: Damage, runs: list[list[bytes]]) -> dict[str, int]:
    damage.flip(runs[0][AT])
    return {"corrupt": 1}


def truncated(damage: Damage, runs: list[list[bytes]]) -> dict[str, int]:
    damage.truncate(runs[1][AT])
    return {"corrupt": 1}


def swapped(damage: Damage, runs: list[list[bytes]]) -> dict[str, int]:
    damage.swap(runs[2][AT], runs[3][AT])
    return {"misplaced": 2}


def without_index(damage: Damage, runs: list[list[bytes]]) -> dict[str, int]:
    damage.lose_index(runs[4][AT])
    return {"unindexed": 1}


def without_value(damage: Damage, runs: list[list[bytes]]) -> dict[str, int]:
    damage.lose_value(runs[4][AT])
    return {"missing": 1}


Spoil = Callable[[Damage, list[list[bytes]]], dict[str, int]]


def damaged(folder: Path, plain: Said, *spoils: Spoil, times: int) -> None:
    """A server that starts over damaged blocks says what it said before, and counts each once."""
    expected: dict[str, int] = {}
    for spoil in spoils:
        damage = Damage(folder / "data" / "kv" / "worker-0")
        runs = damage.own_blocks()
        assert len(runs) == AGENTS
        for fault, count in spoil(damage, runs).items():
            expected[fault] = expected.get(fault, 0) + count
    fetched = sum(count for fault, count in expected.items() if fault != "unindexed")
    with life(folder) as second:
        for _ in range(times):  # the second time from what was computed in their place
            assert agents(second.client) == plain
            faults = second.faults()
            faults.pop("late", None)  # a machine may be slow
            assert faults == expected
            assert totals(second.client)["failed_blocks_total fetch"] == fetched
        assert totals(second.client)["hit_tokens_total disk"] > 0
        assert second.disk()["state"] == "ok", "blocks are damaged, the disk is in order"


def test_damaged_blocks_are_computed_again(folder: Path, plain: Said) -> None:
    damaged(folder, plain, flipped, truncated, swapped, without_index, times=1)


@pytest.mark.prove
@pytest.mark.parametrize("spoil", [flipped, truncated, swapped, without_index, without_value])
def test_each_kind_of_damage_alone(folder: Path, plain: Said, spoil: Spoil) -> None:
    damaged(folder, plain, spoil, times=2)


def changed_model(folder: Path) -> Path:
    """The model with two matrices of the same form exchanged."""
    changed = folder / "changed.gguf"
    shutil.copy(resolve("smollm2-135m").path, changed)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(changed).tensors}
    one, other = found["blk.5.ffn_down.weight"], found["blk.6.ffn_down.weight"]
    assert (one.n_bytes, one.tensor_type) == (other.n_bytes, other.tensor_type)
    with changed.open("r+b") as file:
        for source, target in ((one.data.tobytes(), other), (other.data.tobytes(), one)):
            file.seek(target.data_offset)
            file.write(source)
    return changed


def test_another_models_blocks_are_not_used(folder: Path, plain: Said) -> None:
    with life(folder, model=str(changed_model(folder))) as second:
        said = agents(second.client, 1)
        assert totals(second.client)["hit_tokens_total disk"] == 0
        assert second.client.post("/reset_prefix_cache").json() == {"success": True}
        assert agents(second.client, 1) == said, "as from an empty cache"
        assert said != plain[:AGENTS]
        faults = second.faults()
        faults.pop("late", None)
        assert faults == {"discarded": 1}
        assert second.log().count("is started afresh: it is of another model") == 1


def slow(server: Life, plain: Said) -> None:
    """Nothing comes from the disk before every turn has ended."""
    server.arm("slow")
    assert agents(server.client, 1, range(1)) == plain[:1]
    assert totals(server.client)["faults_total late"] == 1
    assert agents(server.client) == plain
    hung = totals(server.client)
    assert hung["hit_tokens_total disk"] == 0
    assert 1 <= hung["faults_total late"] <= len(plain), "once for each turn that waited, at most"
    assert hung["moving_blocks"] > 0
    server.arm("")
    assert server.faults() == {"late": hung["faults_total late"]}
    assert agents(server.client, 1) == plain[:AGENTS]


def full(server: Life) -> None:
    """Writes fail and nothing else does, until there is room again."""
    before = server.faults()
    written = totals(server.client)["moved_blocks_total write"]
    others = range(100, 104)
    server.arm("full")
    said = agents(server.client, 1, others)
    until(lambda: at_rest(server.client)["disk_failing_workers"] == 1)
    found = at_rest(server.client)
    assert found["failed_blocks_total write"] > 1
    assert found["moved_blocks_total write"] == written
    assert "File too large" in server.disk()["reason"]
    server.arm("")
    assert server.client.post("/reset_prefix_cache").json() == {"success": True}
    assert agents(server.client, 1, others) == said, "as from an empty cache"
    assert server.faults() == before | {"unwritable": 1}


def moved(server: Life, plain: Said) -> None:
    """The folder is moved away under the running worker: its blocks are missed, and it is made again."""
    before = server.faults()
    kv = server.folder / "data" / "kv"
    kv.rename(kv.with_name("moved"))
    assert agents(server.client, 1) == plain[:AGENTS]
    until(lambda: "vanished" in server.faults())
    counted = server.faults() | {"late": 0}  # a machine may be slow
    assert counted == before | {"vanished": 1, "late": 0}
    assert server.disk()["state"] == "ok"
    assert (kv / "worker-0" / "data.mdb").stat().st_mode & 0o777 == 0o600
    assert agents(server.client, 1) == plain[:AGENTS]


def lost(server: Life, plain: Said) -> None:
    """The worker dies and the disk cannot be had any more."""
    before = server.faults()
    kv, worker = server.folder / "data" / "kv", server.worker()
    os.kill(worker, signal.SIGSTOP)  # else it may see for itself that the folder is gone
    kv.rename(kv.with_name("elsewhere"))
    kv.write_text("not a folder")
    os.kill(worker, signal.SIGKILL)
    assert agents(server.client, 1) == plain[:AGENTS]
    assert server.faults() == before | {"unopened": 1}
    assert at_rest(server.client)["disk_failing_workers"] == 1
    disk = server.disk()
    assert (disk["state"], disk["capacity_bytes"]) == ("failing", 0)
    assert "no KV can be kept in" in disk["reason"]
    assert server.client.get("/health").status_code == 200


def test_a_disk_that_is_slow_then_full_then_moved_then_gone(folder: Path, plain: Said) -> None:
    with life(folder) as server:
        slow(server, plain)
        full(server)
        moved(server, plain)
        lost(server, plain)
        until(lambda: server.worker() > 0)
