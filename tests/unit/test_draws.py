import numpy as np
import pytest

from agentserve.executor.draws import philox4x64, uniform


@pytest.mark.parametrize("key", [(0, 0), (1, 2), (2**64 - 1, 2**64 - 1), (0xDEADBEEF, 77)])
@pytest.mark.parametrize("counter", [(0, 0, 0, 0), (5, 0, 0, 0), (2**64 - 2, 7, 1, 3)])
def test_the_block_function_is_numpys_philox(key, counter):
    # numpy counts up before its first block
    oracle = np.random.Philox(key=np.array(key, dtype=np.uint64), counter=np.array(counter, dtype=np.uint64))
    expected = [int(word) for word in oracle.random_raw(4)]
    assert list(philox4x64((counter[0] + 1, *counter[1:]), key)) == expected


def test_known_draws_never_change():
    # Recorded: a change of these changes what every seeded session says.
    assert [uniform(0, p) for p in range(3)] == [
        0.08723912359911234,
        0.011546754286331562,
        0.5023796042735054,
    ]
    assert uniform(2**70 + 5, 10**6) != uniform(5, 10**6)
    assert uniform(-1, 3) == uniform(2**128 - 1, 3)


def test_a_draw_depends_on_seed_and_position_only():
    draws = {(s, p): uniform(s, p) for s in range(20) for p in range(20)}
    assert len(set(draws.values())) == 400
    assert all(uniform(s, p) == u for (s, p), u in reversed(draws.items()))
    with pytest.raises(ValueError, match="negative"):
        uniform(1, -1)


@pytest.mark.parametrize("by", ["position", "seed"])
def test_draws_are_uniform_along_positions_and_along_seeds(by):
    n, bins = 20_000, 64
    pairs = ((7, i) for i in range(n)) if by == "position" else ((i, 7) for i in range(n))
    values = np.array([uniform(s, p) for s, p in pairs])
    assert values.min() >= 0.0
    assert values.max() < 1.0
    counts = np.histogram(values, bins=bins, range=(0, 1))[0]
    chi2 = float(((counts - n / bins) ** 2 / (n / bins)).sum())
    assert 30 < chi2 < 115  # 63 degrees of freedom: beyond either with probability < 1e-4
    assert abs(float(np.corrcoef(values[:-1], values[1:])[0, 1])) < 0.03
