"""What a turn was promised, and when its next token is due (QoServe, ASPLOS 2026).

A token is due at arrival + max(time that its prefill took, promised time to the first token) + promised
time between tokens x its number after the first. Time that a turn is early is thus kept as slack for its
later tokens. Objective: as many turns as possible that keep every promise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from agentserve.types import Slo


def first_due(slo: Slo, arrived: float) -> float:
    """When the first token is due; inf: at no time."""
    if slo.ttft is not None:
        return arrived + slo.ttft
    return arrived + slo.total if slo.total is not None else math.inf


def token_due(slo: Slo, arrived: float, first_token: float, after_first: int) -> float:
    """When token number `after_first` after the first (1, 2, ...) is due. first_token: when that came."""
    due = math.inf
    if slo.pace is not None:
        promised = arrived + slo.ttft if slo.ttft is not None else first_token
        due = max(first_token, promised) + slo.pace * after_first
    return min(due, arrived + slo.total) if slo.total is not None else due


def least_slack(dues: Iterable[float], now: float, least_step: float) -> tuple[float, int]:
    """Seconds that this step may take so that every token that can still be in time is; inf: any.

    A deadline that even a step without prefill (of `least_step` seconds, as cautiously predicted as the
    others) would miss is unattainable: no smaller chunk saves it, so it is set aside, counted in the second
    figure, and never stops prefill.
    """
    slack, missed = math.inf, 0
    for due in dues:
        left = due - now
        if left < least_step:
            missed += 1
        else:
            slack = min(slack, left)
    return slack, missed
