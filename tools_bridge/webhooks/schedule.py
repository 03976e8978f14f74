"""When a delivery that failed is tried again."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

HOUR = 3600.0
MOST_RETRY_AFTER = HOUR  # what a receiver may ask for
_SPREAD = 0.2  # of a delay, which is as much shorter or longer as chance has it: half of it either way
_MOST_HEADER = 64  # characters
THROTTLE = 5.0  # seconds that a receiver is left alone that says it has too much to do, and not for how long


@dataclass(frozen=True, slots=True)
class Schedule:
    """`delays`: seconds between an attempt's failure and the next one. `within`: seconds from the beginning
    to the last attempt, which is made then where the schedule would go beyond it."""

    delays: tuple[float, ...]
    repeats: bool  # the last of them, as often as there is time
    within: float | None = None


TOOL = Schedule((1.0, 5.0, 15.0, 30.0), repeats=True)  # as long as the call has time
LIFECYCLE = Schedule(  # Standard Webhooks' example; its last delay goes beyond three days
    (5.0, 300.0, HOUR / 2, 2 * HOUR, 5 * HOUR, 10 * HOUR, 14 * HOUR, 20 * HOUR, 24 * HOUR),
    repeats=False,
    within=72 * HOUR,
)


def next_attempt(
    schedule: Schedule,
    tries: int,
    began: float,
    now: float,
    random: Callable[[], float],
    *,
    deadline: float | None = None,
    retry_after: float = 0.0,
) -> float | None:
    """The moment of the next attempt after `tries` of them failed; None: there is none.

    `random`: a number in [0, 1). `retry_after`: seconds that the receiver asked for: never sooner.
    """
    drawn = random()
    if tries <= len(schedule.delays):
        delay = schedule.delays[max(0, tries - 1)]
    elif schedule.repeats:
        delay = schedule.delays[-1]
    else:
        return None
    delay = max(delay * (1 - _SPREAD / 2 + _SPREAD * drawn), retry_after * (1 + _SPREAD / 2 * drawn))
    at = now + delay
    if schedule.within is not None:
        end = began + schedule.within
        if now >= end or now + retry_after > end:
            return None
        at = min(at, end)
    if deadline is not None and at >= deadline:
        return None
    return at


def retry_after_seconds(value: str | None, now: float) -> float | None:
    """The header `retry-after`, seconds or an HTTP date (RFC 9110, 10.2.3), never more than an hour; None:
    there is none that means anything."""
    if value is None or len(value) > _MOST_HEADER:
        return None
    value = value.strip(" \t")
    if re.fullmatch(r"[0-9]+", value):
        return min(float(value), MOST_RETRY_AFTER)
    try:
        at = parsedate_to_datetime(value).timestamp()
    except (ValueError, TypeError, OverflowError, IndexError, OSError):
        return None
    return min(max(0.0, at - now), MOST_RETRY_AFTER)
