"""Transfers in flight: ids are never used again, and what is said of one is said once."""

from __future__ import annotations

import math
from random import Random

import pytest

from tests.engines import PRICES
from tiering.flights import LANES, MOST_BLOCKS, Flights
from tiering.types import Block, Change, Move, Tier, Word


def blocks(count: int) -> list[Block]:
    return [Block(bytes([number]) * 32, b"", b"") for number in range(count)]


def test_orders_are_cut_numbered_and_given_once() -> None:
    flights = Flights()
    ordered = flights.order(Move.SAVE, blocks(MOST_BLOCKS + 1))
    assert [(transfer.id, len(transfer.blocks)) for transfer in ordered] == [(1, MOST_BLOCKS), (2, 1)]
    assert flights.take_orders() == ordered
    assert flights.take_orders() == []
    assert (flights.blocks(Move.SAVE), flights.blocks(Move.LOAD)) == (MOST_BLOCKS + 1, 0)
    assert flights.land(1) == ordered[0]
    assert flights.land(1) is None
    assert flights.order(Move.LOAD, blocks(1))[0].id == 3
    assert flights.blocks() == 2


def test_a_transfer_is_hurried_once_and_never_after_its_end() -> None:
    flights = Flights()
    flights.order(Move.LOAD, blocks(1))
    flights.order(Move.LOAD, blocks(1), urgent=True)
    for number in (1, 1, 2, 9):
        flights.hurry(number)
    assert flights.take_changes() == [Change(1, Word.HURRY)]
    landed = flights.land(1)
    assert landed is not None
    assert landed.urgent
    flights.hurry(1)
    assert flights.take_changes() == []


def test_a_transfer_is_taken_back_once_and_stays_in_flight_until_it_is_answered() -> None:
    flights = Flights()
    flights.order(Move.LOAD, blocks(2))
    for number in (1, 1, 9):
        flights.recall(number)
    flights.hurry(1)
    assert flights.take_changes() == [Change(1, Word.CANCEL)]
    assert (flights.recalled(1), flights.oldest, flights.blocks()) == (True, 1, 2)
    assert flights.land(1) is not None
    assert (flights.recalled(1), flights.oldest, flights.blocks()) == (False, math.inf, 0)


def test_what_was_taken_back_is_waited_for_only_where_it_may_be_under_way() -> None:
    flights = Flights()
    for _ in range(3):
        flights.order(Move.LOAD, blocks(4), urgent=True)
    each = PRICES.seconds(PRICES.load, 4)
    assert flights.queue(PRICES, Tier.HOST, urgent=True) == 3 * each
    for number in (1, 2):
        flights.recall(number)
    assert flights.queue(PRICES, Tier.HOST, urgent=True) == 2 * each
    assert flights.queue(PRICES, Tier.DISK, urgent=True) == 0.0


def test_what_is_counted_is_what_flies() -> None:
    flights, random = Flights(), Random(7)
    costs = {Move.SAVE: PRICES.save, Move.LOAD: PRICES.load, Move.WRITE: PRICES.write}
    costs |= dict.fromkeys((Move.FETCH, Move.BORROW), PRICES.fetch)
    for _ in range(400):
        number = random.randint(1, flights._ids + 1)
        match random.randrange(4):
            case 0:
                flights.order(
                    random.choice(list(Move)), blocks(random.randint(0, 70)), urgent=number % 2 == 0
                )
            case 1:
                flights.hurry(number)
            case 2:
                flights.recall(number)
            case _:
                flights.land(number)
        flights.check()
        assert flights.blocks() == sum(len(transfer.blocks) for transfer in flights)
        for tier, urgent in ((Tier.HOST, True), (Tier.DISK, False)):
            ahead = under_way = 0.0
            for transfer in flights:
                if transfer.move in costs and LANES[transfer.move] is tier:
                    seconds = PRICES.seconds(costs[transfer.move], len(transfer.blocks))
                    if flights.recalled(transfer.id) or (urgent and not transfer.urgent):
                        under_way = max(under_way, seconds)
                    else:
                        ahead += seconds
            assert flights.queue(PRICES, tier, urgent=urgent) == pytest.approx(ahead + under_way)
