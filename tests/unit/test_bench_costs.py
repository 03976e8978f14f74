"""What the kernel benchmark counts: SmolLM2-135M by hand, and limits made of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from agentserve.bench.kernels.costs import Costs, Demand, causal_pairs
from agentserve.bench.kernels.products import copies, product_demand
from agentserve.bench.kernels.timing import Rates, Timed
from agentserve.models.hf_config import hf_config

SMOLLM2 = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
INSIDE, HEAD = 30 * (960 * 576 + 576 * 576 + 3072 * 576 + 576 * 1536), 49152 * 576
RATES = Rates(read=40e9, float_ops=900e9, int8_ops=1800e9)


def costs(**changes: object) -> Costs:
    bf16 = Costs(hf_config(SMOLLM2, "smollm2"), INSIDE, HEAD, 2 * INSIDE, 2 * HEAD, torch.bfloat16)
    return replace(bf16, **changes)  # type: ignore[arg-type]


def q4_1(integers: int = 0) -> Costs:
    return costs(inside_bytes=INSIDE * 20 // 32, head_bytes=HEAD * 34 // 32, integers=integers)


def test_the_models_costs_are_those_known_of_it() -> None:
    assert costs().kv_bytes == 30 * 2 * 3 * 64 * 2 == 23_040
    assert costs().weight_bytes == 268_959_744, "269 MB in bf16"
    assert q4_1().weight_bytes == 96_436_224, "96 MB in Q4_1 with a Q8_0 head"
    assert costs().linear_ops(1) == 212_336_640, "212 million operations per token"
    assert costs().attention_ops(0, 2048) / 2048 == pytest.approx(70.8e6, rel=1e-3), "and 71 at 2K"


def test_kv_of_other_dtypes() -> None:
    assert costs(kv_dtype=torch.float32).kv_bytes == 46_080
    assert costs(kv_dtype=torch.int8).kv_bytes == 30 * 2 * 3 * (64 + 4), "a float32 scale per token and head"


@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 9), (5, 4), (2, 1), (40, 6)])
def test_causal_pairs_are_counted(start: int, tokens: int, window: int | None) -> None:
    counted = sum(min(position + 1, window or position + 1) for position in range(start, start + tokens))
    assert causal_pairs(start, tokens, window) == counted


def test_a_chunked_prefill_attends_to_the_same_pairs() -> None:
    chunks = sum(costs().attention_ops(start, 256) for start in range(0, 2048, 256))
    assert chunks == costs().attention_ops(0, 2048)


def test_windows_bound_what_a_row_reads() -> None:
    config = replace(hf_config(SMOLLM2, "smollm2"), windows=(None, *[128] * 29))
    windowed = costs(config=config)
    assert windowed.context_bytes(2048) == 768 * (2048 + 29 * 128)
    assert windowed.context_bytes(100) == 100 * 23_040
    assert windowed.decode([2048]).nbytes == windowed.weight_bytes + windowed.context_bytes(2048)


def test_demands_of_steps() -> None:
    step = costs().decode([2048] * 8)
    assert step.nbytes == 268_959_744 + 8 * 2048 * 23_040
    assert step.float_ops == 8 * (2 * (INSIDE + HEAD) + 4 * 9 * 64 * 30 * 2049)
    shared = costs().decode([2304] * 16, shared=2048)
    assert shared.nbytes == 268_959_744 + (2048 + 16 * 256) * 23_040
    assert shared.float_ops == costs().decode([2304] * 16).float_ops
    assert costs().attention_step([2304] * 16, 2048).nbytes == (2048 + 16 * 256) * 23_040


def test_integers_and_floats_are_told_apart() -> None:
    demand = q4_1(integers=INSIDE).prefill(2048)
    assert demand.int8_ops == 2048 * 2 * INSIDE
    assert demand.float_ops == costs().attention_ops(0, 2048)
    assert demand.nbytes == 0
    whole = demand.int8_ops + demand.float_ops
    assert costs().prefill(2048) == Demand(0, whole)
    assert RATES.seconds(demand)[0] == pytest.approx(demand.int8_ops / 1800e9 + demand.float_ops / 900e9)
    half = q4_1(integers=INSIDE // 2).decode([64] * 3)
    assert half.int8_ops == 3 * INSIDE
    assert half.int8_ops + half.float_ops == costs().decode([64] * 3).float_ops


def test_a_limit_is_the_longer_of_memory_and_products() -> None:
    assert RATES.seconds(Demand(400, 9)) == (10e-9, "memory")
    assert RATES.seconds(Demand(40, 9000)) == (10e-9, "products")
    weight = torch.empty(960, 576, dtype=torch.bfloat16)
    nbytes, operations = 960 * 576 * 2, 2 * 4 * 960 * 576
    assert product_demand([weight] * 2, ["float"] * 2, 4) == Demand(nbytes, operations)
    assert product_demand([weight] * 2, ["int8"] * 2, 4) == Demand(nbytes, 0, operations)
    mixed = product_demand([weight] * 4, ["int8", "float", "int8", "int8"], 4)
    assert mixed == Demand(nbytes, operations // 4, operations * 3 // 4)


def test_products_run_over_more_bytes_than_the_caches_hold() -> None:
    small, large = torch.empty(4, 8), torch.empty(4, 24)
    assert [len(copies([small], nbytes)) for nbytes in (1, 128, 129, 1280)] == [1, 1, 2, 10]
    turns = copies([small, large], 600)
    assert [matrix is small for matrix in turns] == [True, False, True]
    assert product_demand(turns, ["float"] * 3, 1).nbytes == (128 + 384 + 128) // 3


def test_one_row_of_smollm2_at_40_gigabytes_per_second() -> None:
    assert RATES.seconds(costs().decode([64]))[0] == pytest.approx((268_959_744 + 64 * 23_040) / 40e9)
    row = Timed((8e-3, 9e-3, 100e-3), (RATES,) * 3).row("decode step", "1 x 64", costs().decode([64]), "bf16")
    assert (row.value, row.unit, row.limit_name, row.variant) == (9.0, "ms", "memory", "bf16")
    assert row.fraction == pytest.approx(6.76 / 9.0, rel=1e-3)
    assert row.runs == (8.0, 9.0, 100.0)


def test_a_prefills_row_is_in_tokens_per_second() -> None:
    demand = costs().prefill(2048)
    row = Timed((1.0, 0.5, 0.8), (RATES,) * 3).rate_row("prefill", "2,048", demand, 2048)
    assert row.value == pytest.approx(2560)
    assert row.limit == pytest.approx(2048 / (demand.float_ops / 900e9))
    assert row.fraction == pytest.approx(demand.float_ops / 900e9 / 0.8)


def test_the_limit_is_the_median_of_the_rates_between_the_runs() -> None:
    rates = (Rates(10.0, 1.0, 1.0), Rates(40.0, 1.0, 1.0), Rates(20.0, 1.0, 1.0))
    row = Timed((1.0, 1.0, 1.0), rates).row("", "", Demand(20))
    assert row.limit == 1000.0
