"""Victims: which running turn gives its pages up, and how it comes back. Pure.

Who may be taken is a matter of order, not of price: of those that do not stand before whoever needs pages the
turns of the tenant and the priority that stand last (`core/pressure.py`). Among these the price decides.

Objective: the fewest seconds lost for the pages that lack. They lack until the first of those who stay ends,
and by then these will have needed so many: its shortage, which differs from candidate to candidate. A victim

    covers    pages that really become free / its shortage, at most all of it
    costs     the seconds until it is where it was, by the cheapest way, doubled for each time that it was
              preempted before

and who costs least for what it covers goes; of equals who stands last. So one that is nearly done stays (in a
moment all of its pages are there, while without it the others would need more, and it would wait longer), one
whose pages others share stays (they would not become free), and what is cheap to have again goes first.

The ways, each by the one price book:

    recompute  wait here + what is brought from below of what goes, or computed again
    swap       wait here + transfer out + transfer in, each with the queue of its lane, + what has no copy
    migrate    what another worker reads from this one's disk + what it computes; no wait, if it has room

Published rules that this goes on from: pages reclaimed per token to redo, weighed by how much of the output
is left (vLLM's RFC 56897); the least waste of memory x time among preserve, swap and discard (InferCept, ICML
2024); live migration as a third way (Llumnix, OSDI 2024). FastServe's order of next use is a policy's own
(`scheduling/levels.py`).

Progress: who stands first is never among the candidates while anybody stands behind it, and a turn that was
chosen `MOST_CHOSEN` times is spared while others are left; after that who stands last goes, as without
prices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from agentserve.types import SessionId

MOST_CHOSEN = 3  # times that a turn may be chosen for its price


class Why(Enum):
    """What its pages were needed for."""

    DECODE = "decode"  # a turn that writes lacked a page
    SEAT = "seat"  # one that outranks it stood first in line
    STUCK = "stuck"  # nothing could run


class Way(Enum):
    RECOMPUTE = "recompute"
    SWAP = "swap"
    MIGRATE = "migrate"


@dataclass(frozen=True, slots=True)
class Offer:
    way: Way
    seconds: float  # until the turn is where it was


@dataclass(frozen=True, slots=True)
class Shortage:
    """Pages that those who stay will lack."""

    steps: float  # until the first of them ends
    pages: int  # that they need until then


@dataclass(frozen=True, slots=True)
class Candidate:
    """A turn that may be taken."""

    session: SessionId
    freed: int  # pages that become free, of the group that is shortest of them
    lacking: int  # pages that lack without it: at least 1
    preemptions: int  # times that its turn was preempted before
    offers: tuple[Offer, ...]  # at least one


def shortage(turns: int, first: float, page_size: int) -> Shortage:
    """turns: how many stay; first: tokens that the first of them to end is likely to write. A page is needed
    now in any case."""
    steps = max(first, 1.0)
    return Shortage(steps, max(1, math.ceil(turns * steps / page_size)))


def cheapest(offers: Sequence[Offer]) -> Offer:
    """Of equals the first."""
    return min(offers, key=lambda offer: offer.seconds)


def loss(candidate: Candidate) -> float:
    """Seconds lost for the whole of what lacks; infinite if nothing becomes free."""
    covered = min(candidate.freed / candidate.lacking, 1.0)
    if covered <= 0:
        return math.inf
    cost: float = cheapest(candidate.offers).seconds * 2.0**candidate.preemptions
    return cost / covered


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """candidates: as they stand, the last last; at least one."""
    fresh = [one for one in candidates if one.freed and one.preemptions < MOST_CHOSEN]
    if not fresh:
        return candidates[-1]
    return min(reversed(fresh), key=loss)
