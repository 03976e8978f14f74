"""Which way a row goes: picked where the logits are, or sampled on the host. Drawing is a fake here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from agentserve.core.plan import Sampled, SampleSpec
from agentserve.executor.picks import needs_logits
from agentserve.executor.sampler import NotSampled, Sampler
from agentserve.types import ReasoningCap, Sampling, SessionId, TurnId
from kernels.ops import Draw, Logits
from tests.sampler_rig import EOS, VOCAB, make, row, spec

MARK = 300  # what the fake draws from: tokens that the host would hardly choose


class FakeDrawing:
    """Draws by seed and position alone, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Draw] = []

    def __call__(self, values: Tensor, draws: Sequence[Draw]) -> Tensor:
        assert values.shape == (len(draws), VOCAB)
        self.asked += draws
        # The row's best goes in, so that rows and draws that were confused show.
        return torch.tensor(
            [self.token(draw) + best % 7 for draw, best in zip(draws, values.argmax(dim=-1), strict=True)]
        )

    @staticmethod
    def token(draw: Draw) -> int:
        return MARK + (draw.seed * 31 + draw.position) % 100


def picked(sampling: Sampling, logits: np.ndarray, position: int) -> int:
    """What the fake draws of a row."""
    draw = Draw(1.0, 0, 1.0, 0.0, sampling.seed, position)
    return FakeDrawing.token(draw) + int(logits.argmax()) % 7


def sample(sampler: Sampler, logits: np.ndarray, specs: Sequence[SampleSpec]) -> list[Sampled | NotSampled]:
    requests = [(SessionId(f"s{n}"), TurnId(1), one) for n, one in enumerate(specs)]
    return sampler.sample(Logits.of(torch.tensor(logits)), requests)


ON_DEVICE = [
    Sampling(seed=3),
    Sampling(seed=4, temperature=0.2, top_k=9, top_p=0.8, min_p=0.1),
    Sampling(seed=5, stop=("abc",)),
    Sampling(seed=6, min_tokens=2),  # two were generated
    Sampling(seed=7, reasoning=ReasoningCap(9, 8, 7)),
    Sampling(seed=8, stop_token_ids=(9,), ignore_eos=True, max_tokens=500),
]
ON_HOST = [
    Sampling(seed=3, logprobs=0),
    Sampling(seed=3, logit_bias={5: 1.0}),
    Sampling(seed=3, repetition_penalty=1.1),
    Sampling(seed=3, presence_penalty=0.5),
    Sampling(seed=3, frequency_penalty=0.5),
    Sampling(seed=3, min_tokens=3),
    Sampling(seed=3, temperature=0.0, logprobs=1),
]
TOKENS = [5, 6, 7, 20, 21]  # three of the prompt, two generated


@pytest.mark.parametrize("sampling", ON_DEVICE)
def test_rows_that_are_drawn_where_their_logits_are(sampling):
    drawing = FakeDrawing()
    request = spec(sampling, TOKENS, 3)
    assert not needs_logits(request)
    assert sample(make(drawing=drawing), row(1)[None], [request]) == [
        Sampled(token=picked(sampling, row(1), 5))
    ]
    assert drawing.asked == [
        Draw(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed, 5)
    ]
    # Without a drawing backend the host draws, of the same numbers.
    assert sample(make(), row(1)[None], [request])[0].token < VOCAB


@pytest.mark.parametrize("sampling", ON_HOST)
def test_rows_whose_logits_the_host_needs(sampling):
    drawing = FakeDrawing()
    request = spec(sampling, TOKENS, 3)
    assert needs_logits(request)
    found = sample(make(drawing=drawing), row(1)[None], [request])
    assert drawing.asked == []
    assert found == sample(make(), row(1)[None], [request])


def test_a_grammar_needs_the_logits_whatever_else_is_asked():
    assert needs_logits(spec(Sampling(grammar="g"), TOKENS, 3))
    assert needs_logits(spec(Sampling(grammar="g", temperature=0.0, stop=("a",)), TOKENS, 3))


def test_greedy_rows_never_draw_and_need_no_logits():
    drawing, sampler, sampling = FakeDrawing(), make(), Sampling(temperature=0.0)
    for one in (sampling, replace(sampling, stop=("zz",)), replace(sampling, ignore_eos=True)):
        request = spec(one, TOKENS, 3)
        assert not needs_logits(request)
        assert sample(make(drawing=drawing), row(2)[None], [request])[0].token == int(row(2).argmax())
        assert sample(sampler, row(2)[None], [request])[0].token == int(row(2).argmax())
    assert drawing.asked == []


def test_the_way_is_the_same_in_every_batch():
    rng = np.random.default_rng(0)
    settings = [*ON_DEVICE, *ON_HOST, Sampling(temperature=0.0), Sampling(temperature=0.0, stop=("a",))]
    logits = np.stack([row(n) for n in range(len(settings))])
    specs = [spec(one, TOKENS[: 4 + n % 2], 3) for n, one in enumerate(settings)]
    alone = [sample(make(drawing=FakeDrawing()), logits[[n]], [specs[n]])[0] for n in range(len(specs))]
    sampler = make(drawing=FakeDrawing())
    for _ in range(15):
        order = rng.permutation(len(specs))[: int(rng.integers(1, len(specs) + 1))]
        assert sample(sampler, logits[order], [specs[n] for n in order]) == [alone[n] for n in order]


def test_the_path_changes_with_the_position_where_the_request_says_so():
    """Before `min_tokens` ends are forbidden, on the host; from then on the device draws."""
    sampling, drawing = Sampling(seed=1, min_tokens=2, stop_token_ids=(EOS,)), FakeDrawing()
    sampler = make(drawing=drawing)
    for length in (3, 4, 5, 6):
        sample(sampler, row(1)[None], [spec(sampling, [*TOKENS, 22][:length], 3)])
    assert [draw.position for draw in drawing.asked] == [5, 6]


def test_a_stop_string_is_found_in_what_the_device_drew():
    drawing = FakeDrawing()
    sampler, tokens = make(drawing=drawing), list(TOKENS[:3])
    letters = []
    probe = Sampling(seed=2)
    for step in range(4):  # what will be drawn
        letters.append(chr(97 + (picked(probe, row(9), 3 + step) - 4) % 26))
    sampling = Sampling(seed=2, stop=("".join(letters[1:3]),))
    ended = []
    for _ in range(4):
        found = sample(sampler, row(9)[None], [spec(sampling, tokens, 3)])[0]
        tokens.append(found.token)
        ended.append(found.ended)
    assert tokens[3:] == [picked(probe, row(9), 3 + step) for step in range(4)]
    assert ended == [False, False, True, False]
    assert len(drawing.asked) == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_reasoning_that_has_to_end_ends_whatever_was_picked(temperature):
    cap = ReasoningCap(2, 8, 7, inside=True)
    sampling = Sampling(seed=2, temperature=temperature, reasoning=cap)
    sampler = make(drawing=FakeDrawing())
    request = spec(sampling, TOKENS, 3)  # two were spent
    assert sample(sampler, row(9)[None], [request]) == [Sampled(token=8)]
    early = spec(sampling, TOKENS[:4], 3)
    expected = picked(sampling, row(9), 4) if temperature else int(row(9).argmax())
    assert sample(make(drawing=FakeDrawing()), row(9)[None], [early]) == [Sampled(token=expected)]
    far = Sampling(seed=2, temperature=temperature, reasoning=replace(cap, close=VOCAB + 3))
    assert sample(make(drawing=FakeDrawing()), row(9)[None], [spec(far, TOKENS, 3)])[0].token < VOCAB
