"""Every architecture says what transformers says: float32 logits within 1e-4, whatever the path."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from agentserve.core.plan import PageCopy
from agentserve.models.weights import LayerWeights
from kernels import ops_for
from kernels.reference import ReferenceOps
from tests.parity.harness import ARCHITECTURES, CPU, Case, Engine, make_case

TOLERANCE = 1e-4
CLEAR = 1e-2  # what a real mistake exceeds by far


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.manual_seed(0)
    return make_case(Path(tmp_path_factory.mktemp("model")) / "m", request.param)


@pytest.fixture(scope="module", params=["reference", "served"])
def case(made: Case, request: pytest.FixtureRequest) -> Case:
    """On the reference operations, and on those that a server on this machine would use."""
    return replace(made, ops=ReferenceOps(CPU) if request.param == "reference" else ops_for(CPU))


def test_whole_prefill_and_the_logits_are_spread_out(case: Case) -> None:
    assert float(case.expected.std()) >= 1.0
    assert case.error(case.engine().logits(case.tokens, [len(case.tokens)])) <= TOLERANCE


def test_every_position_by_decode(case: Case) -> None:
    found = case.engine().logits(case.tokens, [1])
    assert len(found) == len(case.tokens)
    assert case.error(found) <= TOLERANCE


@pytest.mark.parametrize("size", range(1, 34))
def test_chunked_prefill(case: Case, size: int) -> None:
    assert case.error(case.engine().logits(case.tokens, [size])) <= TOLERANCE


def test_prefix_hit_at_every_offset(case: Case) -> None:
    engine = case.engine()
    tables = engine.tables(len(case.tokens))
    engine.logits(case.tokens, [len(case.tokens)], tables)
    for offset in range(len(case.tokens)):
        found = engine.logits(case.tokens, [len(case.tokens)], tables, start=offset)
        assert case.error(found) <= TOLERANCE, offset


def test_mixed_batches(case: Case) -> None:
    """Sessions at different places decode and prefill in one step, each as if it were alone."""
    engine = case.engine(pages=200, page_size=8, most_rows=40)
    order = random.Random(1)
    computed = dict.fromkeys("abcdef", 0)
    tables = {session: engine.tables(len(case.tokens)) for session in computed}
    while left := [s for s, at in computed.items() if at < len(case.tokens)]:
        chunks, ends = [], {}
        for session in order.sample(left, order.randint(1, len(left))):
            size = order.choice((1, 1, 2, 7, 30, 70))
            ends[session] = min(len(case.tokens), computed[session] + size)
            chunks.append(
                engine.chunk(session, case.tokens, computed[session], ends[session], tables[session])
            )
        engine.run(*chunks)
        for session, end in ends.items():
            assert case.error({end - 1: engine.spy.rows[session]}) <= TOLERANCE
        computed |= ends


@pytest.mark.parametrize("slots", [1, 7, 15, 16])
def test_after_copy_on_write(case: Case, slots: int) -> None:
    """A page's first slots are donated to another session, whose tokens then differ from the donor's."""
    engine = case.engine()
    shared = 2 * 16 + slots
    donor_tokens = case.tokens[:shared] + [5] * (len(case.tokens) - shared)
    donor = engine.tables(len(case.tokens))
    engine.logits(donor_tokens, [len(case.tokens)], donor)
    fresh = engine.tables(len(case.tokens))
    taker = tuple(mine[:2] + other[2:] for mine, other in zip(donor, fresh, strict=True))
    copies = [
        PageCopy(group, mine[2], other[2], slots)
        for group, (mine, other) in enumerate(zip(donor, taker, strict=True))
    ]
    engine.run(engine.chunk("taker", case.tokens, shared, shared + 9, taker), copies=copies)
    found = {shared + 8: engine.spy.rows["taker"]}
    found |= engine.logits(case.tokens, [11], taker, start=shared + 9)
    assert case.error(found) <= TOLERANCE


# --- the tests above can fail ------------------------------------------------------------


def whole(case: Case, engine: Engine) -> float:
    return case.error(engine.logits(case.tokens, [len(case.tokens)]))


def test_a_wrong_rope_theta_shows(case: Case) -> None:
    wrong = replace(case.config.rope, theta=case.config.rope.theta * 1.5)
    assert whole(case, case.altered(rope=wrong)) > CLEAR


@pytest.mark.parametrize("made", ["qwen3", "qwen3-yarn"], indirect=True)
def test_missing_qk_norm_shows(case: Case) -> None:
    assert case.config.qk_norm
    layers = tuple(replace(layer, q_norm=None, k_norm=None) for layer in case.weights.layers)
    assert whole(case, Engine(case.config, replace(case.weights, layers=layers), ops=case.ops)) > CLEAR


def test_positions_off_by_one_show(case: Case) -> None:
    """Rotation is relative: all positions shifted alike change nothing, so only the second chunk's are."""
    engine = case.engine()
    tables = engine.tables(len(case.tokens))
    engine.logits(case.tokens[:30], [30], tables)
    forward = engine.decoder.forward
    engine.decoder.forward = lambda batch: forward(replace(batch, positions=batch.positions + 1))  # type: ignore[method-assign]
    assert case.error(engine.logits(case.tokens, [40], tables, start=30)) > CLEAR


def test_swapped_gqa_heads_show(case: Case) -> None:
    def swap(layer: LayerWeights) -> LayerWeights:
        dim, heads = case.config.head_dim, case.config.heads
        qkv = layer.qkv.clone().view(-1, dim, layer.qkv.shape[1])
        qkv[[0, heads - 1]] = qkv[[heads - 1, 0]]
        return replace(layer, qkv=qkv.view_as(layer.qkv))

    layers = tuple(swap(layer) for layer in case.weights.layers)
    assert whole(case, Engine(case.config, replace(case.weights, layers=layers), ops=case.ops)) > CLEAR


@pytest.mark.parametrize("made", ["mistral-window", "qwen2-windows"], indirect=True)
def test_a_missing_window_shows(case: Case) -> None:
    engine = Engine(replace(case.config, windows=(None,) * case.config.layers), case.weights, ops=case.ops)
    assert whole(case, engine) > CLEAR


@pytest.mark.parametrize("made", ["mistral-window", "qwen2-windows"], indirect=True)
def test_pages_behind_the_window_are_never_read(case: Case) -> None:
    """Released pages may be anyone's: their table entries can be nonsense."""
    engine = case.engine()
    tables = engine.tables(len(case.tokens))
    engine.logits(case.tokens[:60], [60], tables)
    for number, group in enumerate(engine.pool.groups):
        if group.window is not None:
            for index in range((60 - group.window + 1) // 16):
                engine.pool.storages[number][tables[number][index]] = float("nan")
                tables[number][index] = -1
    assert case.error(engine.logits(case.tokens, [3], tables, start=60)) <= TOLERANCE
