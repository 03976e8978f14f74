from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.core.cost import StepCost


@given(
    st.floats(0, 1), st.floats(0, 0.01), st.floats(0, 1e-6), st.integers(0, 10_000), st.integers(1, 4096),
    st.floats(0, 20),
)  # fmt: skip
def test_the_largest_chunk_is_the_largest(
    row: float, token: float, context: float, start: int, most: int, budget: float
) -> None:
    cost = StepCost(per_row=row, per_token=token, per_context=context)
    count = cost.largest_chunk(start, most, budget)
    assert 0 <= count <= most
    if count:
        assert cost.chunk(start, count) <= budget
    if count < most:
        assert cost.chunk(start, count + 1) > budget


def test_negative_coefficients_are_refused() -> None:
    with pytest.raises(ValueError, match="per_token"):
        StepCost(per_token=-1.0)
