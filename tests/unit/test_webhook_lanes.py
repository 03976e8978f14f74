"""Who is delivered next."""

import random

import pytest

from tools_bridge.webhooks.breaker import BreakerSettings, Circuit
from tools_bridge.webhooks.lanes import Lanes, Places
from tools_bridge.webhooks.types import Delivery, Key, Kind


def event(endpoint, name, at=0.0, **more):
    return Delivery(endpoint, name, "t", Kind.LIFECYCLE, 0.0, 0.0, at, 0, **more)


def call(endpoint, name, at=0.0, deadline=100.0, **more):
    return Delivery(endpoint, name, "t", Kind.TOOL, 0.0, 0.0, at, 0, deadline, **more)


def taken(lanes, now=0.0):
    found = [f"{key.endpoint}{key.event}" for key in lanes.take(now)]
    lanes.check()
    return found


def filled(lanes, *deliveries):
    for delivery in deliveries:
        lanes.put(delivery)
    return lanes


def test_endpoints_take_turns_and_each_has_its_bound():
    lanes = filled(Lanes(Places(each=3, all=64)), *(call(name, str(n)) for name in "ab" for n in range(5)))
    assert taken(lanes) == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert taken(lanes) == []
    lanes.succeeded(Key("a", "1"))
    assert taken(lanes) == ["a3"]


def test_calls_go_before_events_which_leave_them_a_place():
    lanes = filled(Lanes(Places(each=3, all=64)), *(event("a", str(n)) for n in range(5)))
    assert taken(lanes) == ["a0", "a1"]
    filled(lanes, call("a", "x"), call("a", "y"))
    assert taken(lanes) == ["ax"]
    lanes.succeeded(Key("a", "0"))
    assert taken(lanes) == ["ay"]


def test_slow_endpoints_leave_places_to_others():
    lanes = filled(Lanes(Places(each=4, all=8)), *(call(name, str(n)) for name in "abc" for n in range(9)))
    assert taken(lanes) == ["a0", "b0", "c0", "a1"]  # half of the places; then whoever has none
    filled(lanes, call("d", "0"), call("e", "0"), call("f", "0"), call("g", "0"), call("h", "0"))
    assert taken(lanes) == ["d0", "e0", "f0", "g0"]
    assert lanes.next_moment(0.0) == 100.0  # the deadlines of those that wait
    lanes.succeeded(Key("d", "0"))
    assert taken(lanes) == ["h0"]


def test_an_owners_endpoints_leave_places_to_others():
    lanes = Lanes(Places(each=2, all=8, owner=3))
    filled(lanes, *(call(name, "0", owner="ann") for name in "abcde"), call("x", "0", owner="bob"))
    assert taken(lanes) == ["a0", "b0", "c0", "x0"]
    assert lanes.next_moment(0.0) == 100.0
    lanes.succeeded(Key("x", "0"))
    assert taken(lanes) == []
    lanes.succeeded(Key("b", "0"))
    assert taken(lanes) == ["d0"]


def test_nothing_is_taken_before_it_is_due():
    lanes = filled(Lanes(), event("a", "0", at=5.0), event("a", "1", at=3.0), event("b", "2", at=9.0))
    assert taken(lanes, 2.0) == []
    assert lanes.next_moment(2.0) == 3.0
    assert taken(lanes, 5.0) == ["a1", "a0"]
    assert lanes.next_moment(5.0) == 9.0


def test_what_was_put_again_is_due_then_and_once():
    lanes = filled(Lanes(), event("a", "0"))
    assert taken(lanes) == ["a0"]
    lanes.failed(Key("a", "0"), 0.0)
    filled(lanes, event("a", "0", at=5.0))
    assert taken(lanes, 4.0) == []
    assert taken(lanes, 5.0) == ["a0"]
    assert taken(lanes, 5.0) == []


def test_what_was_dropped_is_not_taken_and_gives_its_place_back():
    lanes = filled(Lanes(Places(each=2, all=2)), *(call("a", str(n)) for n in range(4)))
    assert taken(lanes) == ["a0"]
    filled(lanes, call("b", "0"))
    assert taken(lanes) == ["b0"]
    lanes.drop(Key("a", "0"))
    lanes.drop(Key("a", "1"))
    lanes.drop(Key("b", "0"))
    lanes.drop(Key("c", "7"))
    assert taken(lanes) == ["a2"]
    assert len(lanes) == 2


OPENS = BreakerSettings(failures=2, cooldown=10.0)


def test_an_open_circuit_holds_back_what_can_wait_and_ends_what_cannot():
    lanes = filled(Lanes(breaker=OPENS), *(event("a", str(n)) for n in range(3)))
    taken(lanes)
    for n in range(2):
        lanes.failed(Key("a", str(n)), 1.0)
    assert lanes.circuit("a", 1.0) is Circuit.OPEN
    filled(lanes, call("a", "soon", deadline=11.0), call("a", "later", deadline=11.1), event("a", "event"))
    assert lanes.hopeless(1.0) == [(Key("a", "soon"), True)]
    lanes.drop(Key("a", "soon"))
    assert taken(lanes, 10.9) == []
    assert lanes.next_moment(1.0) == 11.0
    assert lanes.circuit("a", 11.0) is Circuit.HALF_OPEN
    assert taken(lanes, 11.0) == ["alater"]
    assert taken(lanes, 11.0) == []
    lanes.succeeded(Key("a", "later"))
    assert taken(lanes, 11.0) == ["aevent"]


def test_a_call_waits_for_the_attempt_that_decides_until_its_deadline():
    lanes = filled(Lanes(breaker=OPENS), *(event("a", str(n)) for n in range(3)))
    taken(lanes)
    for n in range(2):
        lanes.failed(Key("a", str(n)), 0.0)
    lanes.failed(Key("a", "2"), 0.0)
    filled(lanes, event("a", "probe", at=10.0))
    assert taken(lanes, 10.0) == ["aprobe"]
    filled(lanes, call("a", "x", deadline=15.0))
    assert lanes.hopeless(10.0) == []
    assert lanes.next_moment(10.0) == 15.0
    assert lanes.hopeless(15.0) == [(Key("a", "x"), False)]


def test_a_pause_holds_back_one_endpoint():
    lanes = filled(Lanes(), call("a", "0"), call("a", "1"), call("b", "0"))
    assert taken(lanes) == ["a0", "b0", "a1"]
    lanes.succeeded(Key("a", "0"), pause_until=30.0)
    filled(lanes, call("a", "2"), call("b", "2"), call("a", "3", deadline=20.0))
    assert taken(lanes) == ["b2"]
    assert lanes.hopeless(0.0) == [(Key("a", "3"), True)]
    lanes.drop(Key("a", "3"))
    assert lanes.next_moment(0.0) == 30.0
    assert taken(lanes, 30.0) == ["a2"]


def test_an_endpoint_that_is_no_more():
    lanes = filled(Lanes(), call("a", "0"), call("b", "0"))
    taken(lanes)
    lanes.drop(Key("a", "0"))
    lanes.forget("a")
    lanes.forget("a")
    lanes.check()
    assert len(lanes) == 1


def test_a_replay_is_nobodys_call():
    lanes = filled(
        Lanes(Places(each=2, all=8)), *(event("a", str(n), replays=1, deadline=1.0) for n in range(3))
    )
    assert taken(lanes, 50.0) == ["a0"]
    assert lanes.hopeless(50.0) == []


@pytest.mark.parametrize("seed", range(30))
def test_wild_histories_deliver_all(seed):
    """Whatever order things come in, nothing due is left while there is a place, and everything ends."""
    choose, now = random.Random(seed), 0.0
    lanes = Lanes(Places(each=choose.randint(2, 4), all=choose.randint(2, 9)), BreakerSettings(2, 5.0, 20.0))
    waiting, running = {}, {}
    for n in range(300):
        make = choose.choice([call, event])
        waiting[Key(choose.choice("abcde"), str(n))] = make
    for key, make in waiting.items():
        lanes.put(
            make(
                key.endpoint,
                key.event,
                at=choose.random() * 50,
                **({"deadline": 1e9} if make is call else {}),
            )
        )
    for _ in range(10_000):
        for key in lanes.take(now):
            running[key] = waiting.pop(key)
        lanes.check()
        if running and choose.random() < 0.8:
            key, make = running.popitem()
            if choose.random() < 0.3:
                lanes.failed(key, now, choose.choice([None, now + 3.0]))
                more = {"deadline": 1e9} if make is call else {}
                lanes.put(make(key.endpoint, key.event, at=now + choose.random() * 9, **more))
                waiting[key] = make
            elif choose.random() < 0.1:
                lanes.drop(key)
            else:
                lanes.succeeded(key, choose.choice([None, now + 2.0]))
            continue
        at = lanes.next_moment(now)
        if at is None or at > 1e8:
            assert running or not waiting
        elif not running:
            assert at > now
            now = at
        if not running and not waiting:
            break
    assert not running
    assert not waiting
    assert len(lanes) == 0
