"""Kernel threads of the tests wait as those of workers do; set before anything imports torch."""

from __future__ import annotations

import os

import pytest

from agentserve.server.workers.supervisor import KERNEL_THREADS

for name, value in KERNEL_THREADS.items():
    os.environ.setdefault(name, value)


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "where to write what the 200 kills came to, as JSON"
    parser.addoption("--crash-report", metavar="FILE", help=told)
    told = "where to write what the fuzz of a whole server came to, as JSON"
    parser.addoption("--fuzz-report", metavar="FILE", help=told)
