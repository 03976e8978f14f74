"""Sessions aborted in every state, on the real executor, mover and stores: afterwards nothing is live,
pinned, staged or under way, and who comes next says what a cold engine says."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from agentserve.core.session import Session
from agentserve.messages import Abort, Close, Park
from agentserve.models.decoder import Decoder
from agentserve.types import FinishReason, SessionId
from kernels import ops_for
from tests.abort_rig import PROMPTS, RealRig
from tests.abort_states import COUNT, NAME, RESTING, STATES
from tests.parity.harness import CPU
from tests.parity.test_parity_engine import Ledger, real_rig, tiny
from tiering.policy.base import Choice

Tell = Callable[[str], None]
Oracle = list[list[int]]
SESSIONS = 200  # per state, its ways in turns
WAYS = ("abort", "close")
FEW = 2


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    """A tiny model of two KV groups."""
    torch.set_num_threads(1)
    config, weights = tiny("qwen2-windows", torch.float32)
    return Decoder(config, weights, ops_for(CPU), 4096)


@pytest.fixture(scope="module")
def ledger() -> Ledger:
    """Holds every engine to the same bits after the same tokens."""
    return Ledger()


@pytest.fixture(scope="module")
def oracle(decoder: Decoder, ledger: Ledger) -> Oracle:
    """What a cold engine says after each prompt."""
    said = []
    for prompt in PROMPTS:
        rig = real_rig(decoder, ledger, 64, prefix_cache=False)
        rig.submit("cold", prompt, max_tokens=COUNT)
        rig.drain()
        said.append(rig.output("cold"))
    return said


@pytest.fixture
def rig(decoder: Decoder, ledger: Ledger, tmp_path: Path) -> Iterator[RealRig]:
    threads = threading.active_count()
    made = RealRig(tmp_path / "kv", decoder, ledger, max_num_seqs=3)
    yield made
    made.close()
    assert threading.active_count() == threads


def end(rig: RealRig, state: str, way: str) -> None:
    """End the session where it is: by a command that is read at that moment."""
    session = rig.core.sessions.get(SessionId(NAME))
    assert session is not None
    if way == "close":
        rig.core.handle(Close(session.id), rig.now)
        assert rig.core.sessions.get(session.id) is None
    else:
        if state in RESTING:  # nothing runs: the turn that has just come is aborted
            rig.core.handle(Abort(session.id, session.last_turn), rig.now)  # changes nothing
            rig.submit(NAME, [*session.tokens, 7], max_tokens=COUNT)
        assert session.turn is not None
        rig.core.handle(Abort(session.id, session.turn.id), rig.now)
        rig._collect()
        assert rig.ended(NAME, session.last_turn).reason is FinishReason.ABORTED
        assert session.turn is None
    rig._collect()


def one(rig: RealRig, state: str, way: str, number: int, oracle: Oracle) -> None:
    """One session's life and end; what is left afterwards."""
    prompt, said = PROMPTS[number % len(PROMPTS)], oracle[number % len(PROMPTS)]
    rest = STATES[state](rig, prompt)
    threads = threading.active_count()
    end(rig, state, way)
    rest()
    assert rig.core.view().pages_live == 0, "before its transfers have ended"
    rig.settle()
    rig.at_rest()
    assert threading.active_count() == threads
    for name in (NAME, "next"):  # itself again, and somebody else with the same prompt
        assert rig.turn(name, prompt, COUNT) == said
    rig.settle()
    rig.empty()
    rig.policy.__init__()  # type: ignore[misc]


@pytest.mark.parametrize("state", STATES)
def test_aborted_in_every_state_slice(state: str, rig: RealRig, oracle: Oracle) -> None:
    for number in range(FEW):
        one(rig, state, WAYS[number % 2], number, oracle)


@pytest.mark.prove
@pytest.mark.parametrize("state", STATES)
def test_aborted_in_every_state(state: str, rig: RealRig, oracle: Oracle, tell: Tell) -> None:
    done: Counter[str] = Counter()
    for number in range(SESSIONS):
        way = WAYS[number % 2]
        one(rig, state, way, number // 2, oracle)
        done[way] += 1
    tell(", ".join(f"{way} {count}" for way, count in done.items()))


# --- all at once ---------------------------------------------------------------------------------


class Crowd:
    """Many sessions in one engine, each ended where it happens to be."""

    def __init__(self, rig: RealRig, seed: int) -> None:
        self.rig = rig
        self.rng = random.Random(seed)
        self.ends: Counter[str] = Counter()

    def run(self, sessions: int) -> None:
        rig, rng = self.rig, self.rng
        for number in range(sessions):
            prompt = rng.choice(PROMPTS)[: rng.randrange(20, 81)]
            rig.submit(f"s{number}", prompt, max_tokens=rng.randrange(1, 20))
            for _ in range(rng.randrange(4)):
                self.act()
            if rng.random() < 0.3:
                rig.pass_time(rng.choice([0.01, 0.1, 2.0]))
        in_step = rig.begin()  # what is left ends in the middle of a step
        for session in list(rig.core.sessions):
            self.end(session)
        if in_step is not None:
            rig.finish(in_step)
        rig.drain()

    def act(self) -> None:
        """A step, and something that happens to somebody."""
        rig, rng = self.rig, self.rng
        rig.step()
        rig.policy.choice = rng.choice(list(Choice))
        rig.policy.eager = rng.random() < 0.5
        session = rng.choice(list(rig.core.sessions) or [None])
        if session is None:
            return
        if rng.random() < 0.4:
            self.end(session)
        elif session.turn is None and rng.random() < 0.5:
            rig.core.handle(Park(session.id, session.last_turn, True, ("tool",)), rig.now)
        elif session.turn is None and len(session.tokens) < 100:
            rig.submit(session.id, [*session.tokens, 7], max_tokens=3)

    def end(self, session: Session) -> None:
        rig, state = self.rig, session.state.value
        if session.turn is not None and self.rng.random() < 0.5:
            rig.core.handle(Abort(session.id, session.turn.id), rig.now)
            self.ends[f"{state} abort"] += 1
        else:
            rig.core.handle(Close(session.id), rig.now)
            self.ends[f"{state} close"] += 1
        rig._collect()


def crowd(rig: RealRig, seed: int, sessions: int) -> Counter[str]:
    made = Crowd(rig, seed)
    made.run(sessions)
    rig.settle()
    rig.at_rest()
    rig.empty()
    return made.ends


def test_a_crowd_slice(rig: RealRig) -> None:
    ends = crowd(rig, 0, 60)
    assert len(ends) > 5, "of several states"


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(1, 11))
def test_a_crowd(seed: int, rig: RealRig, tell: Tell) -> None:
    ends = crowd(rig, seed, SESSIONS)
    tell(", ".join(f"{where} {count}" for where, count in sorted(ends.items())))
