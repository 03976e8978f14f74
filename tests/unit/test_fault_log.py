"""Thousands of damaged blocks are a few lines in the log, and every one of them is in a sum."""

from __future__ import annotations

import logging

import pytest

from agentserve.server.workers.fault_log import BURST, FaultLog
from tiering.types import TierFault


def test_the_first_is_said_at_once_and_a_burst_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    said = FaultLog()
    with caplog.at_level(logging.WARNING):
        said.look(5.0)
        said.add((), 5.0)
        assert caplog.records == []
        said.add((TierFault.CORRUPT,), 5.0)
        for number in range(1000):
            said.add((TierFault.CORRUPT, TierFault.MISSING), 5.0 + BURST * number / 1001)
        assert len(caplog.records) == 1
        said.look(5.0 + BURST)
        said.look(5.0 + 9 * BURST)
        said.add((TierFault.MISPLACED,), 5.0 + 9 * BURST)
        said.add((TierFault.UNREADABLE,), 5.1 + 9 * BURST)
        said.flush()
        said.flush()
    start = "faults of KV on disk since the last such line: "
    assert [record.getMessage() for record in caplog.records] == [
        start + "1 corrupt",
        start + "1000 corrupt, 1000 missing",
        start + "1 misplaced",
        start + "1 unreadable",
    ]
