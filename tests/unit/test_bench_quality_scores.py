"""Perplexity and divergence against examples worked by hand, and where float32 would not do."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from agentserve.bench.quality_reading import predicted, windows
from agentserve.bench.quality_scores import Divergence, Meter, kl, log_probabilities, perplexity, score


def logits_of(*rows: tuple[float, ...]) -> Tensor:
    """Logits of these probabilities; every row moved by another constant, which must not matter."""
    shifts = torch.arange(len(rows), dtype=torch.float64)[:, None] * 3.5
    return torch.tensor(rows, dtype=torch.float64).log() + shifts


def meter(exact: Tensor, rounded: Tensor) -> Divergence:
    found = Meter()
    found.add(exact, rounded, log_probabilities(rounded))
    return found.divergence()


def test_perplexity_by_hand() -> None:
    """Surprises of ln 2, ln 4 and ln 8 have a mean of ln 4."""
    row = (0.5, 0.25, 0.125, 0.125)
    found, none = score([logits_of(row, row, row)], torch.tensor([0, 1, 3]))
    assert found == pytest.approx(4.0, rel=1e-12)
    assert none == []
    assert perplexity(torch.tensor([math.log(3.0)] * 5, dtype=torch.float64)) == pytest.approx(3.0)


def test_a_model_that_knows_nothing_has_the_vocabulary_as_perplexity() -> None:
    assert score([torch.zeros(7, 11)], torch.arange(7))[0] == pytest.approx(11.0, rel=1e-12)


def test_kl_by_hand() -> None:
    exact, given = logits_of((0.5, 0.5), (1 / 4, 3 / 4)), logits_of((1 / 4, 3 / 4), (1 / 4, 3 / 4))
    found = kl(log_probabilities(exact), log_probabilities(given))
    assert found.tolist() == pytest.approx([0.5 * math.log(4 / 3), 0.0], abs=1e-15)


def test_kl_is_of_the_exact_distribution_from_the_rounded_one() -> None:
    """The other way round it is another number: 1/4 ln(1/2) + 3/4 ln(3/2)."""
    one, other = log_probabilities(logits_of((0.5, 0.5))), log_probabilities(logits_of((1 / 4, 3 / 4)))
    assert float(kl(other, one)[0]) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    assert float(kl(one, other)[0]) != pytest.approx(float(kl(other, one)[0]), rel=0.05)


def test_tiny_differences_are_not_drowned() -> None:
    """Of a small change d of the logits, KL is half the variance of d, up to its third power."""
    generator = torch.Generator().manual_seed(1)
    exact = torch.randn(5, 50_000, generator=generator) * 3
    change = torch.randn(5, 50_000, generator=generator, dtype=torch.float64) * 1e-5
    weight = log_probabilities(exact).exp()
    mean = (weight * change).sum(-1, keepdim=True)
    expected = (weight * (change - mean) ** 2).sum(-1) / 2
    found = kl(log_probabilities(exact), log_probabilities(exact.to(torch.float64) + change))
    assert torch.allclose(found, expected, rtol=1e-3, atol=0)
    assert 1e-12 < float(found.max()) < 1e-9


def test_extreme_logits_stay_numbers() -> None:
    exact = torch.tensor([[1e4, 0.0, -1e4], [0.0, 0.0, 0.0]])
    rounded = torch.tensor([[-1e4, 0.0, 1e4], [0.0, 0.0, 1e4]])
    assert kl(log_probabilities(exact), log_probabilities(rounded)).tolist() == pytest.approx(
        [2e4, 2e4 / 3 - math.log(3)], rel=1e-9
    )
    assert kl(log_probabilities(exact), log_probabilities(exact)).tolist() == [0.0, 0.0]


def test_what_a_divergence_counts() -> None:
    exact = torch.tensor([[2.0, 1.0, 0.0]] * 4)
    rounded = exact.clone()
    rounded[1, 0] += 0.25  # the same token on top
    rounded[2, 1] += 1.5  # another one
    found = meter(exact, rounded)
    by_row = kl(log_probabilities(exact), log_probabilities(rounded))
    assert found.kl_mean == pytest.approx(float(by_row.sum()) / 4)
    assert found.kl_max == float(by_row[2]) > 0
    assert by_row[1] < found.kl_p99 < found.kl_max
    assert (found.top1_agreement, found.largest_difference, found.equal_rows) == (0.75, 1.5, 0.5)


def test_the_percentile_leaves_out_one_in_a_hundred() -> None:
    exact = torch.zeros(201, 2)
    rounded = exact.clone()
    rounded[0, 0] = 9.0
    assert meter(exact, rounded).kl_p99 == 0.0
    rounded[1:3, 0] = 9.0
    assert meter(exact, rounded).kl_p99 == pytest.approx(meter(exact, rounded).kl_max)


@pytest.mark.parametrize("sizes", [(40,), (1,) * 40, (7, 33), (39, 1)])
def test_slices_are_no_part_of_the_result(sizes: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(2)
    exact = torch.randn(40, 30, generator=generator)
    rounded = exact + 0.1 * torch.randn(40, 30, generator=generator)
    rounded[8:12] = exact[8:12]
    tokens = torch.randint(30, (40,), generator=generator)
    whole = score([rounded], tokens, [exact])
    cut = score(torch.split(rounded, list(sizes)), tokens, [exact])
    assert cut == whole
    assert whole[1][0].equal_rows == 0.1
    own, found = score(torch.split(exact, list(sizes)), tokens, [exact, rounded])
    assert own == score([exact], tokens)[0] != whole[0]
    assert found[0] == Divergence(0.0, 0.0, 0.0, 1.0, 0.0, 1.0)
    assert found[1].kl_mean > 0


def test_missing_rows_are_an_error() -> None:
    with pytest.raises(ValueError, match="logits of 3 positions for 4 tokens"):
        score([torch.zeros(3, 5)], torch.zeros(4, dtype=torch.int64))


def test_windows_and_what_is_predicted() -> None:
    assert windows(range(10), 4) == [range(4), range(4, 8), range(8, 10)]
    assert predicted(windows(range(10), 4)).tolist() == [1, 2, 3, 5, 6, 7, 9]
    assert windows(range(9), 4) == [range(4), range(4, 8)], "a token alone predicts nothing"
    assert windows([5], 4) == []
    with pytest.raises(ValueError, match="a window of 1 tokens predicts nothing"):
        windows(range(9), 1)
