"""`agentserve bench frontend` on a few streams and a short history: every token is met, and once."""

from __future__ import annotations

import numpy as np
import pytest

from agentserve.bench.frontend.history import measure_history
from agentserve.bench.frontend.streams import StreamSizes, measure_streams

pytestmark = [pytest.mark.process, pytest.mark.model]


def test_every_token_of_every_stream_is_timed() -> None:
    found = measure_streams("smollm2-135m", StreamSizes(streams=3, tokens=30, tick=0.005))
    assert found.delays.shape == (3, 30)
    assert np.all(found.delays > 0)  # the worker wrote each moment down, and before it was here
    assert found.cpu >= 0


def test_a_history_is_about_as_long_as_asked() -> None:
    found = measure_history("smollm2-135m", 5000, 2)
    assert 4000 < found.tokens < 6000
    assert len(found.known) == 2
    assert min(found.known) > 0
