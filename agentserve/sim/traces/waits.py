"""How long tools take: a mixture of log-normals per tool, mixed by how often agents call it.

The whole has the quantiles that are published of a coding agent's tools (Claude Code on SWE-bench Pro,
n = 16,886: MORI, arXiv 2606.00866): P50 1.10 s, P90 2.03 s, P99 19.98 s, P99.95 83.6 s. That each tool
has a fast and a slow mode, and that few calls hold most of the time (the slowest tenth of `cd` calls has
94 % of that tool's), is Continuum's observation (arXiv 2511.02230); the orders of magnitude of single
tools are TokenCake's (arXiv 2510.18586: files 0.1 s, web 1-5 s). The split into these six tools is ours:
the publications give the whole. Waits include what a client adds around a tool.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import NormalDist

import msgspec

PUBLISHED = {0.5: 1.10, 0.9: 2.03, 0.99: 19.98, 0.9995: 83.6}
"""Quantiles of the mix in seconds, as MORI gives them."""

_NORMAL = NormalDist()


class Mode(msgspec.Struct, frozen=True):
    """One log-normal part of a tool's waits: its share of the calls, median in seconds, sigma of the log."""

    share: float
    median: float
    sigma: float


class Tool(msgspec.Struct, frozen=True):
    """A tool by name: its weight among all calls, and its modes, whose shares add up to 1."""

    name: str
    weight: float
    modes: tuple[Mode, ...]

    def draw(self, rng: random.Random) -> float:
        """Seconds that one call takes."""
        at = rng.random()
        for mode in self.modes:
            at -= mode.share
            if at < 0:
                break
        return mode.median * rng.lognormvariate(0.0, mode.sigma)

    def below(self, seconds: float) -> float:
        """The share of calls that take less."""
        return sum(
            mode.share * _NORMAL.cdf(math.log(seconds / mode.median) / mode.sigma) for mode in self.modes
        )


CODING_TOOLS: tuple[Tool, ...] = (
    Tool("read_file", 0.30, (Mode(0.97, 0.70, 0.40), Mode(0.03, 2.5, 0.9))),
    Tool("edit_file", 0.22, (Mode(0.985, 1.0, 0.30), Mode(0.015, 4.0, 0.9))),
    Tool("shell", 0.36, (Mode(0.94, 1.40, 0.27), Mode(0.06, 6.0, 1.0))),
    Tool("search", 0.08, (Mode(0.96, 1.15, 0.35), Mode(0.04, 5.0, 0.8))),
    Tool("run_tests", 0.025, (Mode(0.45, 1.7, 0.35), Mode(0.55, 15.5, 0.75))),
    Tool("fetch_url", 0.015, (Mode(0.475, 1.8, 0.5), Mode(0.525, 11.0, 1.05))),
)


def pick(tools: Sequence[Tool], rng: random.Random) -> Tool:
    """One tool, as often as its weight says."""
    return rng.choices(tools, weights=[tool.weight for tool in tools])[0]


def quantile(tools: Sequence[Tool], share: float) -> float:
    """Seconds below which `share` of the calls of the mix stay: exact, by bisection in the logarithm."""
    whole = sum(tool.weight for tool in tools)
    low, high = 1e-6, 1e6
    for _ in range(100):
        middle = math.sqrt(low * high)
        if sum(tool.weight * tool.below(middle) for tool in tools) < share * whole:
            low = middle
        else:
            high = middle
    return high
