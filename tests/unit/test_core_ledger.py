"""Blocks that very many sessions share: who does, and what they are worth because of it."""

from __future__ import annotations

import math
import random
from array import array

from agentserve.core.ledger import MANY, Known, Ledger
from agentserve.types import SessionId
from tiering.types import Tier

PAGE = 4
SHARED = array("i", range(3 * PAGE))


class Crowd:
    """Sessions with one beginning, and a price for each."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.prices: dict[str, float] = {}
        self.ledger = Ledger(PAGE, self._worth)

    def _worth(self, known: Known, tier: Tier) -> float:
        self.asked.append(known.id)
        return self.prices[known.id]

    def come(self, name: str, price: float, *more: int) -> Known:
        known = self.ledger.open(SessionId(name), 0.0)
        self.prices[name] = price
        self.ledger.rename(known, b"root", SHARED + array("i", more))
        self.ledger.keys(known, len(known.tokens) // PAGE)
        return known


def test_a_crowd_that_comes_and_goes_is_known_at_every_moment() -> None:
    rng, crowd = random.Random(3), Crowd()
    there: list[str] = []
    largest = 0
    for number in range(12 * MANY):
        if there and (rng.random() < 0.4 or number > 9 * MANY):
            crowd.ledger.forget(SessionId(there.pop(rng.randrange(len(there)))))
        else:
            crowd.come(str(number), float(number), *([number] * PAGE))
            there.append(str(number))
        crowd.ledger.check()
        largest = max(largest, len(there))
        if there:
            key = crowd.ledger.keys(crowd.ledger.known[SessionId(there[0])], 1)[0]
            assert crowd.ledger.sharers(key) == tuple(there), "in the order in which they came"
            assert crowd.ledger.best(key, 0, Tier.DEVICE) == max(map(float, there))
            assert crowd.ledger.private(crowd.ledger.known[SessionId(there[-1])]) == (
                4 if len(there) == 1 else 1
            )
    assert largest > MANY
    for name in there:
        crowd.ledger.forget(SessionId(name))
    ledger = crowd.ledger
    assert not ledger.known
    assert len(ledger.adopted) == len(ledger.orphaned), "each block that was somebody's is nobody's now"
    assert not any(ledger.owned(key) for key in ledger.orphaned)


def test_whoever_leaves_a_crowd_for_another_history_keeps_what_is_the_same() -> None:
    crowd = Crowd()
    people = [crowd.come(str(number), 1.0) for number in range(2 * MANY)]
    first, second, third = people[0].keys
    crowd.ledger.rename(people[5], b"root", SHARED[: 2 * PAGE] + array("i", [9] * PAGE))
    crowd.ledger.check()
    assert SessionId("5") in crowd.ledger.sharers(first)
    assert SessionId("5") in crowd.ledger.sharers(second)
    assert SessionId("5") not in crowd.ledger.sharers(third)
    assert crowd.ledger.orphaned == []


def test_in_a_crowd_nobody_is_priced_once_it_is_clear_that_nobody_is_worth_more() -> None:
    crowd = Crowd()
    for number in range(2 * MANY):
        crowd.come(str(number), 1.0)
    key = crowd.come("latest", math.inf).keys[0]
    assert crowd.ledger.best(key, 0, Tier.DEVICE) == math.inf
    assert crowd.asked == ["latest"]
