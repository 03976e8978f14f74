"""Two ranks in two processes over gloo: the whole model's logits, and bits that no company changes."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from agentserve.core.plan import Chunk, PageCopy
from agentserve.models.load import load_model
from agentserve.models.shard import Shard
from kernels.reference import ReferenceOps
from tests.parity.harness import CPU, VOCAB, Engine
from tests.process.group_rank import group
from tests.unit.test_models_shard import TOKENS, assert_alike, folder_of, logits

pytestmark = pytest.mark.process
MOST_ROWS = 24  # so that plans take several passes


def histories(rng: random.Random, count: int) -> list[list[int]]:
    """Token sequences, each but the first beginning as an earlier one does."""
    made: list[list[int]] = []
    for _ in range(count):
        head = rng.choice(made)[: rng.randrange(1, 40)] if made else []
        made.append(head + [rng.randrange(VOCAB) for _ in range(rng.randrange(20, 70))])
    return made


def alone(engine: Engine, tokens: list[int], ends: set[int]) -> dict[int, Tensor]:
    """Logits at these ends, each computed from nothing in one chunk with nobody else."""
    found = {}
    for end in ends:
        tables = engine.tables(end)
        engine.run(engine.chunk("alone", tokens, 0, end, tables))
        found[end] = engine.spy.rows["alone"]
        engine.free(tables)
    return found


def in_company(engine: Engine, sessions: list[list[int]], rng: random.Random) -> list[dict[int, Tensor]]:
    """Logits where chunks happened to end: chunks of any size, any number of sessions in a step, each session
    after the first begun on a copy of what an earlier one has computed of their common head."""
    tables = [engine.tables(len(tokens)) for tokens in sessions]
    done = [0] * len(sessions)
    found: list[dict[int, Tensor]] = [{} for _ in sessions]
    while any(done[number] < len(tokens) for number, tokens in enumerate(sessions)):
        before = list(done)  # copies are made before the step's chunks run
        copies: list[PageCopy] = []
        chunks: list[Chunk] = []
        for number, tokens in rng.sample(list(enumerate(sessions)), rng.randrange(1, len(sessions) + 1)):
            if done[number] == len(tokens):
                continue
            if not done[number]:
                donor, shared = best_donor(sessions, before, number)
                copies += copied(tables[donor], tables[number], shared, engine.pool.page_size)
                done[number] = shared
            end = min(len(tokens), done[number] + rng.choice((1, 1, 2, 7, 16, 33)))
            chunks.append(engine.chunk(str(number), tokens, done[number], end, tables[number]))
            done[number] = end
        engine.run(*chunks, copies=copies)
        for chunk in chunks:
            found[int(chunk.session)][chunk.start + len(chunk.tokens)] = engine.spy.rows[chunk.session]
    for table in tables:
        engine.free(table)
    return found


def best_donor(sessions: list[list[int]], done: list[int], number: int) -> tuple[int, int]:
    """Who has computed most of what this session begins with, and how much of it."""
    tokens, best = sessions[number], (0, 0)
    for donor, others in enumerate(sessions):
        shared = 0
        while shared < min(done[donor], len(tokens) - 1) and others[shared] == tokens[shared]:
            shared += 1
        if donor != number and shared > best[1]:
            best = (donor, shared)
    return best


def copied(
    donor: Sequence[array[int]], table: Sequence[array[int]], shared: int, size: int
) -> list[PageCopy]:
    pages = range(-(-shared // size))
    return [
        PageCopy(kind, donor[kind][page], table[kind][page], min(size, shared - page * size))
        for kind in range(len(donor))
        for page in pages
    ]


def check_histories(engine: Engine, seeds: range) -> int:
    compared = 0
    for seed in seeds:
        rng = random.Random(seed)
        sessions = histories(rng, rng.randrange(2, 5))
        for tokens, found in zip(sessions, in_company(engine, sessions, rng), strict=True):
            sample = set(rng.sample(sorted(found), min(5, len(found)))) | {len(tokens)}
            for end, row in alone(engine, tokens, sample).items():
                assert torch.equal(row, found[end]), (seed, end)
                compared += 1
    return compared


def test_two_processes_say_what_one_says_and_no_company_changes_a_bit(tmp_path: Path) -> None:
    """Alone, in batches, chunks, several passes, on what another has computed: the same logits, which are the
    whole model's but for rounding."""
    source = folder_of(tmp_path, "llama-biased")
    expected = logits(load_model(source, torch.float32, CPU), ReferenceOps(CPU), Shard())
    with group(tmp_path, tmp_path / "meeting", "fp32", MOST_ROWS) as engine:
        assert_alike(torch.stack(list(engine.logits(TOKENS, [17, 1, 13, 9]).values())), expected)
        assert check_histories(engine, range(3)) >= 25


@pytest.mark.prove
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ["llama", "llama-tied-mha", "qwen3", "qwen2-windows"])
def test_no_company_changes_a_bit_at_length(tmp_path: Path, name: str, dtype: str) -> None:
    folder_of(tmp_path, name)
    with group(tmp_path, tmp_path / "meeting", dtype, MOST_ROWS) as engine:
        assert check_histories(engine, range(40)) > 400
