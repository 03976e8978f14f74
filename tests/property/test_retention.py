"""A client's ranges move its own blocks alone: nobody else's goes earlier for them, whatever they say."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.core.ledger import Ledger, Stage
from agentserve.types import SessionId
from tiering.hints import receive
from tiering.policy.base import Hints
from tiering.types import Tier

PAGE = 4
FIRST = (math.inf, math.inf)
WILD = st.one_of(
    st.floats(),
    st.lists(
        st.fixed_dictionaries(
            {"start": st.integers(-2, 60), "priority": st.integers(-5, 200)},
            optional={"end": st.none() | st.integers(-2, 60)},
        ),
        max_size=5,
    ),
)
# Who branches off whom after how many blocks, how many blocks of its own it has, what it is worth, and how.
CROWD = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.integers(0, 6),
        st.integers(1, 6),
        st.sampled_from([0.0, 0.5, 1.0, 1.0, 7.0, math.inf]),
        st.sampled_from(list(Stage)),
    ),
    min_size=1,
    max_size=6,
)


def crowd(told: Sequence[tuple[int, int, int, float, Stage]], without: int | None = None) -> Ledger:
    worth: dict[SessionId, float] = {}
    ledger = Ledger(PAGE, lambda known, tier: worth[known.id])
    contexts: list[array[int]] = []
    for number, (parent, shared, own, value, stage) in enumerate(told):
        begin = contexts[parent % len(contexts)][: shared * PAGE] if contexts else array("i")
        contexts.append(begin + array("i", [1000 * number + i for i in range(own * PAGE)]))
        if number == without:
            continue
        known = ledger.open(SessionId(f"s{number}"), float(number))
        worth[known.id] = value
        known.stage, known.told = stage, stage is Stage.RESTING
        ledger.rename(known, b"n" * 32, contexts[-1])
        ledger.keys(known, len(contexts[-1]) // PAGE)
    return ledger


def before(order: Sequence[bytes]) -> dict[bytes, set[bytes]]:
    return {key: set(order[:place]) for place, key in enumerate(order)}


@settings(deadline=None, max_examples=200)
@given(CROWD, st.integers(0, 5), WILD)
def test_nobody_elses_block_goes_earlier(
    told: list[tuple[int, int, int, float, Stage]], who: int, retain: object
) -> None:
    who %= len(told)
    hints, _ = receive({"retain": retain}, 0.0)
    plain, hinted, alone = crowd(told), crowd(told), crowd(told, without=who)
    client = hinted.known[SessionId(f"s{who}")]
    hinted.hinted(client, hints)
    for tier in Tier:
        was, now = before(list(plain.losers(tier)(FIRST))), before(list(hinted.losers(tier)(FIRST)))
        fair = before(list(alone.losers(tier)(FIRST)))
        assert now.keys() == was.keys()
        for key in was:
            if client.id not in hinted.sharers(key):
                assert now[key] >= was[key]
            elif len(hinted.sharers(key)) > 1:  # its other sharers lose it no earlier than without this one
                assert now[key] & fair.keys() >= fair[key]
        keys = [key for key in hinted.losers(tier)(FIRST) if key in set(client.keys)]
        assert keys == [key for key in reversed(client.keys) if key in set(keys)]  # the tail before the head
        for known in plain.known.values():
            for index, key in enumerate(known.keys):
                most, worth = plain.best(key, index, tier), hinted.best(key, index, tier)
                assert worth <= most
                if client.id not in hinted.sharers(key):
                    assert worth == most
    hinted.check()


@given(CROWD, st.integers(0, 5))
def test_saying_the_same_of_everything_says_nothing(
    told: list[tuple[int, int, int, float, Stage]], who: int
) -> None:
    plain, hinted = crowd(told), crowd(told)
    client = hinted.known[SessionId(f"s{who % len(told)}")]
    hints, _ = receive({"retain": [{"start": 0, "priority": 100}]}, 0.0)
    assert hints != Hints()
    hinted.hinted(client, hints)
    assert list(hinted.losers(Tier.HOST)(FIRST)) == list(plain.losers(Tier.HOST)(FIRST))
