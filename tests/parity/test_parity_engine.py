"""The whole engine on a real model: cold = cached = preempted = forked = resumed = batched, in bits.

Every row of logits that is sampled from is filed under the tokens before it. Whatever path led to
a prefix, its row must have the same bits, and those of an engine that has no cache, no company and
room for everything.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.messages import Abort, Fork, Park, ToolSignal, pack_tokens
from agentserve.models.config import DecoderConfig
from agentserve.models.decoder import Decoder
from agentserve.models.hf_config import hf_config
from agentserve.models.load import load_model
from agentserve.models.source import resolve
from agentserve.models.weights import DecoderWeights, random_weights
from agentserve.types import SessionId, TurnId
from kernels import ops_for
from kernels.reference import ReferenceOps
from tests.parity.harness import CPU, VOCAB, config_json
from tests.parity.ledger import Ledger, cold_rows, real_rig
from tiering.policy.base import Signal

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@lru_cache
def tiny(name: str, dtype: torch.dtype) -> tuple[DecoderConfig, DecoderWeights]:
    config = hf_config(config_json(name), name)
    return config, random_weights(config, 3, std=0.25, dtype=dtype)


SHARED = random.Random(1).choices(range(VOCAB), k=60)

STEPS = st.one_of(
    st.tuples(
        st.just("turn"), st.integers(0, 3), st.integers(0, 60), st.lists(st.integers(0, 1), max_size=6)
    ),
    st.tuples(st.just("extend"), st.integers(0, 3), st.lists(st.integers(0, 1), min_size=1, max_size=20)),
    st.tuples(st.just("fork"), st.integers(0, 3), st.integers(1, 40)),
    st.tuples(st.just("abort"), st.integers(0, 3)),
    st.tuples(st.just("steps"), st.integers(1, 5)),
    st.tuples(st.just("upload"), st.integers(0, 3), st.lists(st.integers(0, 1), min_size=1, max_size=40)),
)


@pytest.mark.parametrize("backend", ["reference", "served"])
@pytest.mark.parametrize(("name", "dtype"), [("llama", "bf16"), ("qwen3", "fp32"), ("qwen2-windows", "bf16")])
@settings(max_examples=12, deadline=None)
@given(
    history=st.lists(STEPS, min_size=6, max_size=24),
    pages=st.integers(9, 16),
    budget=st.sampled_from((16, 40, 512)),
    seed=st.integers(0, 99),
)
def test_random_histories(
    name: str,
    dtype: str,
    backend: str,
    history: list,
    pages: int,
    budget: int,
    seed: int,  # type: ignore[type-arg]
) -> None:  # type: ignore[type-arg]
    config, weights = tiny(name, DTYPES[dtype])
    ops = ReferenceOps(CPU) if backend == "reference" else ops_for(CPU)
    decoder = Decoder(config, weights, ops, positions=512)
    ledger = Ledger()
    rig = real_rig(decoder, ledger, pages, max_batched_tokens=budget, max_num_seqs=4)
    asked: list[tuple[list[int], int]] = []
    forks = 0

    def submit(session: str, tokens: list[int], count: int) -> None:
        known = rig.core.sessions.get(SessionId(session))
        if (known is None or known.turn is None) and len(tokens) + count < rig.core.limit:
            rig.submit(session, tokens, max_tokens=count)
            asked.append((tokens, count))

    for step in history:
        session = rig.core.sessions.get(SessionId(f"s{step[1]}"))
        match step:
            case ("turn", number, shared, own):
                submit(f"s{number}", [*SHARED[:shared], *own, number], 3 + seed % 30)
            case ("extend", number, more) if session is not None and session.tokens:
                submit(f"s{number}", [*session.tokens, *more], 4)
            case ("fork", number, length) if session is not None and session.tokens:
                forks += 1
                rig.core.handle(Fork(session.id, SessionId(f"f{forks}"), length), rig.now)
                child = rig.core.sessions.get(SessionId(f"f{forks}"))
                assert child is not None
                submit(child.id, list(child.tokens), 6)
            case ("abort", _) if session is not None and session.turn is not None:
                rig.core.handle(Abort(session.id, session.turn.id), rig.now)
            case ("upload", number, more) if session is not None and session.tokens and session.turn is None:
                prompt = [*session.tokens, *more]  # of which half is known, then three quarters
                rig.core.handle(Park(session.id, session.last_turn, waiting_tool=True), rig.now)
                for known in (len(more) // 2, len(more) * 3 // 4):
                    told = pack_tokens(array("i", prompt[: len(session.tokens) + known]))
                    news = ToolSignal(session.id, session.last_turn, Signal.STREAMING, told)
                    rig.core.handle(news, rig.now)
                    rig.step()
                submit(f"s{number}", prompt, 4)
            case ("steps", count):
                for _ in range(count):
                    rig.step()
    rig.drain()
    assert all(pool.live == 0 for pool in rig.core.kv.pools)
    for prefix, row in cold_rows(decoder, asked).rows.items():
        if prefix in ledger.rows:
            assert torch.equal(row, ledger.rows[prefix]), f"other bits than cold at position {len(prefix)}"


@pytest.mark.parametrize("backend", ["reference", "served"])
def test_what_was_computed_ahead_has_the_same_bits(backend: str) -> None:
    config, weights = tiny("llama", torch.bfloat16)
    decoder = Decoder(
        config, weights, ReferenceOps(CPU) if backend == "reference" else ops_for(CPU), positions=512
    )
    ledger = Ledger()
    rig = real_rig(decoder, ledger, 24, max_batched_tokens=64)
    rig.submit("a", SHARED[:37], max_tokens=3)
    rig.drain()
    rig.core.handle(Park(SessionId("a"), TurnId(1), waiting_tool=True), rig.now)
    prompt = [*SHARED[:37], *rig.output("a"), *SHARED]
    for known in (50, 61, 95):
        news = ToolSignal(
            SessionId("a"), TurnId(1), Signal.STREAMING, pack_tokens(array("i", prompt[:known]))
        )
        rig.core.handle(news, rig.now)
        while rig.step() is not None:
            pass
    rig.submit("a", prompt, max_tokens=6)
    rig.drain()
    assert rig.ended("a", 2).usage.cached == 95
    cold = cold_rows(decoder, [(prompt, 6)]).rows
    assert len(cold) == 6
    for prefix, row in cold.items():
        assert torch.equal(row, ledger.rows[prefix]), f"other bits than cold at position {len(prefix)}"


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["bf16"])
def test_smollm2_preempted_forked_resumed(dtype: str, two_threads: None) -> None:
    """The real model under pressure: preemption, a fork in mid-turn, a resume after a tool, a rerun."""
    loaded = load_model(resolve("smollm2-135m"), DTYPES[dtype], CPU)
    decoder = Decoder(loaded.config, loaded.weights, ops_for(CPU), positions=1024)
    ledger = Ledger()
    rig = real_rig(decoder, ledger, 11, max_batched_tokens=64, max_num_seqs=4)
    prompts = random.Random(4)
    shared = prompts.choices(range(1000, 40_000), k=37)
    asked = []
    for number in range(3):
        prompt = [*shared, *prompts.choices(range(1000, 40_000), k=20 + number)]
        rig.submit(f"s{number}", prompt, max_tokens=30)
        asked.append((prompt, 30))
    for _ in range(6):
        rig.step()
    rig.core.handle(Fork(SessionId("s0"), SessionId("fork"), 50), rig.now)
    forked = list(rig.core.sessions.get(SessionId("fork")).tokens)  # type: ignore[union-attr]
    rig.submit("fork", forked, max_tokens=12)
    asked.append((forked, 12))
    rig.drain()
    assert sum(rig.ended(f"s{number}").usage.preemptions for number in range(3)) > 0
    resumed = [*rig.core.sessions.get(SessionId("s0")).tokens, *shared[:9]]  # type: ignore[union-attr]
    rig.submit("s0", resumed, max_tokens=8)
    asked.append((resumed, 8))
    rig.submit("again", asked[1][0], max_tokens=30)
    rig.drain()
    assert rig.ended("s0", 2).usage.cached > 0
    assert rig.output("again") == rig.output("s1")
    cold = cold_rows(decoder, asked).rows
    assert len(cold) >= 30 * 3
    for prefix, row in cold.items():
        assert torch.equal(row, ledger.rows[prefix]), f"other bits than cold at position {len(prefix)}"
