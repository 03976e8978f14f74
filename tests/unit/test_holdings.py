"""What is full goes from who holds most: one tenant does not push out what is another's."""

from __future__ import annotations

import random

from agentserve.server.holdings import Holdings


def test_who_holds_most_gives_the_oldest() -> None:
    held: Holdings[str] = Holdings(4, 100)
    held.put("b", "b0", 1)
    for number in range(4):
        held.put("a", f"a{number}", 1)
    assert held.next_out() == "a0"
    assert held.next_out(lambda name: name != "a0") == "a1"
    held.touch("a", "a0")
    assert held.next_out() == "a1"
    held.drop("a", "a1")
    assert held.next_out() is None
    held.resize("b", "b0", 98)
    assert (held.size, held.next_out()) == (101, "b0")  # of bytes it is b who has most


def test_who_has_no_more_than_a_share_gives_nothing() -> None:
    held: Holdings[str] = Holdings(4, 100)
    for number in range(4):
        held.put("a", f"a{number}", 1)
    held.put("b", "b0", 1)
    held.put("b", "b1", 1)
    assert held.givers() == ["a"]
    assert held.next_out(lambda name: name.startswith("b")) is None


def test_whatever_is_put_fits_and_nobody_small_loses() -> None:
    rng = random.Random(5)
    held: Holdings[tuple[str, int]] = Holdings(40, 400)
    for number in range(2000):
        tenant = rng.choice("aaaaab")
        held.put(tenant, (tenant, number), rng.randrange(20))
        while (out := held.next_out()) is not None:
            held.drop(out[0], out)
        if number == 3:
            held.put("small", ("small", 0), 50)
        assert not held.too_much
    assert list(held.oldest("small")) == [("small", 0)]
    for tenant in "ab":
        for name in list(held.oldest(tenant)):
            held.drop(tenant, name)
    held.drop("small", ("small", 0))
    assert (held.count, held.size, held.givers()) == (0, 0, [])
