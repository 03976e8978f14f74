"""How large a chunk may be: one rule, whichever policy orders the turns.

A chunk is all that a turn lacks if every cap allows that. Else it is the smallest cap, cut back so that it
ends on a page edge: (start + chunk) mod page = 0. The time cap is asked last, of what the others leave.
Objective: fill the step without breaking a limit, and never leave a partly filled page in mid-prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

LargestInTime = Callable[[int], int]
"""The largest chunk, at most as many tokens as given, whose step is predicted to end in time."""


@dataclass(frozen=True, slots=True)
class Caps:
    """What is left of the limits of one step, in tokens of this turn."""

    tokens: int  # of max_batched_tokens
    pages: int  # slots that it has or could get, less what is reserved
    in_time: LargestInTime | None = None  # None: the step is not limited by time


def new_pages(stored: int, count: int, page_size: int) -> int:
    """Pages that a turn with `stored` tokens of KV needs for `count` more (a decode: 1 + drafts)."""
    return -(-(stored + count) // page_size) + -stored // page_size


def chunk_size(start: int, lag: int, page_size: int, caps: Caps) -> tuple[int, str]:
    """Tokens to run of `lag` that lack KV from position `start` on, and the cap that binds.

    The cap is "tokens", "pages" or "time", as named in a plan's reasons; empty if nothing is cut.
    """
    count, limit = lag, ""
    for most, name in ((caps.tokens, "tokens"), (caps.pages, "pages")):
        fits = whole_pages(start, lag, max(most, 0), page_size)
        if fits < count:
            count, limit = fits, name
    if count and caps.in_time is not None:
        most = caps.in_time(count)
        if most < count:
            count, limit = whole_pages(start, lag, most, page_size), "time"
    return count, limit


def whole_pages(start: int, lag: int, most: int, page_size: int) -> int:
    """`lag` if it is no more than `most`; else the largest count below that ends on a page edge."""
    if lag <= most:
        return lag
    return max(0, (start + most) // page_size * page_size - start)
