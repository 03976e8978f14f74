"""A tensor-parallel group's plans on their way, and what becomes of ranks that cannot go on."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.config import load
from agentserve.core.plan import Chunk, PageCopy, Plan, SampleSpec, StepResult
from agentserve.executor.group import (
    GroupBroken,
    GroupExecutor,
    decode_plan,
    encode_plan,
    follow,
    read_frame,
    write_frame,
)
from agentserve.executor.runner import TorchExecutor
from agentserve.models.errors import ModelError
from agentserve.server.workers.build_rank import open_rank
from agentserve.server.workers.followers import CannotFollow, Followers, Loaded
from agentserve.server.workers.spec import WorkerSpec, device_of, worker_spec
from agentserve.types import Sampling, SessionId, TurnId
from agentserve.values import ConfigError
from tests.parity.harness import config_json

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=40).map(lambda ids: array("i", ids))
SPECS = st.builds(SampleSpec, st.just(Sampling(temperature=0.7)), IDS, st.just(1), st.just(2))
CHUNKS = st.builds(
    Chunk,
    st.just(SessionId("a")),
    st.just(TurnId(3)),
    st.just(0),
    st.integers(0, 2**31 - 1),
    IDS,
    st.lists(IDS, min_size=1, max_size=3).map(tuple),
    st.none() | SPECS,
)
COPIES = st.builds(PageCopy, st.integers(0, 3), st.integers(0, 99), st.integers(0, 99), st.integers(0, 16))
PLANS = st.builds(
    Plan,
    st.integers(0, 2**40),
    st.lists(COPIES, max_size=3).map(tuple),
    st.lists(CHUNKS, max_size=4).map(tuple),
    st.just(0.5),
    st.just(()),
)


def spec_of(**flags: object) -> WorkerSpec:
    return worker_spec(load({"threads": 1, **flags}), 1, "unused", os.getpid(), cores=12)


@given(PLANS)
def test_followers_get_rows_pages_and_whose_logits(plan: Plan) -> None:
    found = decode_plan(encode_plan(plan))
    assert (found.step, found.copies) == (plan.step, plan.copies)
    assert [(c.start, c.tokens, c.tables, c.sample is None) for c in found.chunks] == [
        (c.start, c.tokens, c.tables, c.sample is None) for c in plan.chunks
    ]


@given(st.lists(st.binary(max_size=99), max_size=5), st.integers(0, 9))
def test_frames_come_whole_or_not_at_all(bodies: list[bytes], missing: int) -> None:
    pipe = io.BytesIO()
    for body in bodies:
        write_frame(pipe, body)
    cut = io.BytesIO(pipe.getvalue()[: max(0, len(pipe.getvalue()) - missing)])
    found = []
    while (body := read_frame(cut)) is not None:
        found.append(body)
    assert found == bodies[: len(found)]
    assert missing or found == bodies


class Noted:
    """An executor that writes down what it is to run, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.plans: list[Plan] = []
        self._error = error

    def run(self, plan: Plan) -> StepResult:
        self.plans.append(plan)
        if self._error is not None:
            raise self._error
        return StepResult(plan.step, (), 0.0)


EMPTY = Plan(7, (PageCopy(0, 1, 2, 3),), (), 0.0, ())


def test_every_follower_runs_what_the_leader_runs() -> None:
    pipes, own = [io.BytesIO(), io.BytesIO()], Noted()
    leader = GroupExecutor(cast(TorchExecutor, own), pipes)
    assert leader.run(EMPTY).step == 7
    leader.run(msgspec.structs.replace(EMPTY, step=8))
    for pipe in pipes:
        pipe.seek(0)
        other = Noted()
        follow(cast(TorchExecutor, other), pipe)
        assert [(plan.step, plan.copies) for plan in other.plans] == [(7, EMPTY.copies), (8, EMPTY.copies)]


def test_a_step_that_fails_on_one_rank_ends_the_group() -> None:
    """Not as other failed steps, which their turns alone pay for: `SystemExit` passes the loop."""
    with pytest.raises(GroupBroken, match="step 7 "):
        GroupExecutor(cast(TorchExecutor, Noted(RuntimeError("no memory"))), []).run(EMPTY)
    reading, writing = os.pipe()
    os.close(reading)
    gone = os.fdopen(writing, "wb", buffering=0)
    with gone, pytest.raises(GroupBroken, match="step 7 "):
        GroupExecutor(cast(TorchExecutor, Noted()), [cast(io.BufferedWriter, gone)]).run(EMPTY)
    pipe = io.BytesIO()
    write_frame(pipe, encode_plan(EMPTY))
    pipe.seek(0)
    with pytest.raises(RuntimeError):
        follow(cast(TorchExecutor, Noted(RuntimeError("no memory"))), pipe)


ANSWER = """
import subprocess
import sys
sys.stdin.buffer.read(4)
for body in map(bytes.fromhex, sys.argv[1:]):
    sys.stdout.buffer.write(len(body).to_bytes(4, "big") + body)
    sys.stdout.buffer.flush()
sys.stdin.buffer.read()
"""


def followers(*answers: Loaded | CannotFollow, script: str = ANSWER) -> Followers:
    bodies = [msgspec.msgpack.encode(answer).hex() for answer in answers]
    return Followers(spec_of(tensor_parallel=3), [sys.executable, "-S", "-c", script, *bodies])


def test_ranks_agree_on_files_and_on_the_smallest_pool() -> None:
    group = followers(Loaded("digest", (7, 20), 100))
    assert group.loaded("digest", (9, 9)) == ((7, 9), 200)
    group.close()
    group = followers(Loaded("another", (7, 7), 100))
    with pytest.raises(ValueError, match="files changed"):
        group.loaded("digest", (9, 9))
    group.close()


def test_why_a_rank_cannot_follow_is_told_in_its_words() -> None:
    group = followers(CannotFollow("rank 1: no such device"))
    with pytest.raises(ValueError, match="rank 1: no such device"):
        group.loaded("digest", (9,))
    group.close()
    group = followers(script="raise SystemExit(3)")
    with pytest.raises(ValueError, match=r"died before it was ready \(exit status 3\)"):
        group.loaded("digest", (9,))
    group.close()


def test_where_one_cannot_be_started_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def no_room_for_a_second(*args: Any, **settings: Any) -> subprocess.Popen[bytes]:
        if started:
            raise BlockingIOError("no more processes")
        started.append(popen(*args, **settings))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", no_room_for_a_second)
    with pytest.raises(BlockingIOError):
        followers()
    assert started[0].returncode is not None


def test_ranks_have_devices_and_cores_of_their_own() -> None:
    assert [device_of(spec_of(tensor_parallel=4), rank) for rank in range(2)] == ["cpu", "cpu"]
    ranked = worker_spec(load({"tensor_parallel": 4, "workers": 2, "device": "cuda"}), 1, "", 1, cores=16)
    assert [device_of(ranked, rank) for rank in (0, 3)] == ["cuda:4", "cuda:7"]
    assert (ranked.threads, ranked.kv_share) == (2, 1)  # a GPU has one rank
    assert device_of(spec_of(tensor_parallel=2, device="cuda:3"), 1) == "cuda:6"
    assert device_of(spec_of(device="cuda:3"), 0) == "cuda:3"
    shared = worker_spec(load({"tensor_parallel": 4, "workers": 2}), 0, "", 1, cores=16)
    assert (shared.threads, shared.kv_share) == (2, 8)


@pytest.mark.parametrize("flags", [{"host_kv": "1MiB"}, {"disk_kv": "1MiB", "data_dir": "x"}])
def test_tiers_are_refused_with_several_ranks(flags: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel: 2 ranks keep KV on their devices only"):
        load({"tensor_parallel": 2, **flags})
    load({"tensor_parallel": 1, **flags})
    load({"tensor_parallel": 2, "data_dir": "x"})


def test_what_ranks_cannot_share_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_json("llama")))  # and nothing else
    spec = {"model": str(tmp_path), "dtype": "fp32", "device_kv": "8MiB"}
    with pytest.raises(ModelError, match="6 heads cannot be shared equally by 4 ranks"):
        open_rank(spec_of(tensor_parallel=4, **spec))
    rank, whole = open_rank(spec_of(tensor_parallel=2, **spec), 1), open_rank(spec_of(**spec))
    assert (rank.config.heads, rank.config.kv_heads) == (3, 1)
    assert rank.groups[0].page_bytes * 2 == whole.groups[0].page_bytes
    assert rank.pages()[0] // 2 == whole.pages()[0]  # a rank's pool has the bytes, for half of the heads
