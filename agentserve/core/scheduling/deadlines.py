"""What a turn was promised, and when its next token is due (QoServe, ASPLOS 2026).

A token is due at arrival + max(time that its prefill took, promised time to the first token) + promised
time between tokens x its number after the first. Time that a turn is early is thus kept as slack for its
later tokens; where a gap was promised, none may be longer. Objective: as many turns as possible that keep
every promise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from agentserve.types import Slo

UNPROMISED, LAXEST = 4.0, 60.0  # seconds
STRETCH = 4.0  # a prompt without a promise may be passed for so many times the time that it takes


def within(slo: Slo) -> float:
    """Seconds from its arrival on after which nobody of its tenant who comes later goes before a turn,
    whatever he was promised."""
    first = first_due(slo, 0.0)
    return UNPROMISED if first == math.inf else min(first, LAXEST)


def first_due(slo: Slo, arrived: float) -> float:
    """When the first token is due; inf: at no time."""
    promised = [value for value in (slo.ttft, slo.total) if value is not None]
    return arrived + min(promised, default=math.inf)


def read_by(slo: Slo, arrived: float, takes: float, now: float) -> float:
    """When the rest of a prompt, which takes so many seconds, should begin to be read: of several prompts the
    one with the earliest moment goes on.

    Who was promised a first token must begin in time for it (least slack first). Who cannot be in time any
    more stands behind all that come within `UNPROMISED` seconds from then on. And who was promised nothing
    may be passed for `STRETCH` times what it takes. So the moment of who waits stays, those of newcomers grow
    with time, and nobody is passed forever.
    """
    due = wanted_by(slo, arrived, takes)
    if first_due(slo, arrived) == math.inf or now + takes <= due:
        return due
    return max(due, arrived + STRETCH * takes) + UNPROMISED


def wanted_by(slo: Slo, arrived: float, takes: float) -> float:
    """When a prompt is due, or is bearable where nothing was promised."""
    due = first_due(slo, arrived)
    return due if due < math.inf else arrived + STRETCH * takes


def paced_from(slo: Slo, arrived: float, first_token: float) -> float:
    """The moment that the times of later tokens count from. first_token: when that came."""
    return max(first_token, arrived + slo.ttft) if slo.ttft is not None else first_token


@dataclass(frozen=True, slots=True)
class Course:
    """How a turn went."""

    arrived: float
    first_token: float  # 0: it has none
    ended: float
    generated: int
    late: int  # tokens after the first that came after they were due
    wide: int  # gaps between tokens that were longer than promised
    whole: bool  # the model ended it, or its length: else somebody cut it off
    moved: bool = False  # it came with tokens from another worker, which knew when the first one came


def judged(slo: Slo, course: Course) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Promises that were kept, and that were not. Of a turn that was cut off, those that it had not broken
    by then are in neither: nobody can tell of them."""
    took = course.ended - course.arrived
    first = course.first_token - course.arrived if course.first_token else None
    verdicts: dict[str, bool | None] = {}
    if slo.ttft is not None and not course.moved:
        verdicts["ttft"] = _held(slo.ttft, first, took)
    if slo.tbt is not None:
        verdicts["tbt"] = False if course.late else True if course.whole else None
    if slo.gap is not None:
        verdicts["gap"] = False if course.wide else True if course.whole else None
    if slo.tpot is not None and course.whole:
        paced = course.ended - course.first_token
        verdicts["tpot"] = paced <= slo.tpot * max(course.generated - 1, 1)
    if slo.total is not None:
        verdicts["total"] = _held(slo.total, took if course.whole else None, took)
    kept = tuple(name for name, held in verdicts.items() if held)
    return kept, tuple(name for name, held in verdicts.items() if held is False)


def _held(promised: float, took: float | None, so_far: float) -> bool | None:
    """took: None, where it has not happened."""
    if took is not None:
        return took <= promised
    return False if so_far > promised else None


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
