"""What is owed and what was, within bounds."""

import msgspec
import pytest

from tools_bridge.webhooks.ledger import Ledger, OutboxLimits
from tools_bridge.webhooks.signing import Secret, make_secret
from tools_bridge.webhooks.types import (
    Attempt,
    Conflict,
    Delivered,
    Delivery,
    Endpoint,
    EndpointDisabled,
    EventTooLarge,
    GaveUp,
    Key,
    Kind,
    OutboxFull,
    State,
    ToolResult,
    UnknownDelivery,
    UnknownEndpoint,
    Why,
)

LIMITS = OutboxLimits(
    endpoints=4, endpoints_of_owner=2, body=100, owed=8, owed_to_endpoint=5, owed_bytes=400, owners_share=1.0,
    logged=6, logged_of_endpoint=3, logged_bytes=200,
)  # fmt: skip
SECRET = Secret(make_secret(bytes(32)))


def endpoint(name, owner="ann", types=("t",), **more):
    return Endpoint(name, owner, name, "https://a.example/", types, (SECRET,), 0.0, 0.0, **more)


def delivery(endpoint, event, body=b"", kind=Kind.LIFECYCLE, now=0.0):
    return Delivery(endpoint, event, "t", kind, now, now, now, len(body), 60.0 if kind is Kind.TOOL else None)


@pytest.fixture
def ledger():
    made = Ledger(LIMITS)
    made.add_endpoint(endpoint("a"))
    made.add_endpoint(endpoint("b"))
    yield made
    made.check()


def accept(ledger, endpoint, event, body=b"", kind=Kind.LIFECYCLE):
    assert ledger.accept(delivery(endpoint, event, body, kind), body)
    return Key(endpoint, event)


def test_endpoints_are_bounded_for_an_owner_and_in_all(ledger):
    with pytest.raises(OutboxFull):
        ledger.add_endpoint(endpoint("c"))
    ledger.add_endpoint(endpoint("c", "bob"))
    ledger.add_endpoint(endpoint("d", "bob"))
    with pytest.raises(OutboxFull):
        ledger.add_endpoint(endpoint("e", "eve"))
    ledger.remove_endpoint("c", 0.0)
    ledger.add_endpoint(endpoint("e", "eve"))


def test_an_owners_events_go_to_its_own_endpoints_that_want_them(ledger):
    ledger.add_endpoint(endpoint("c", "bob"))
    ledger.change_endpoint(endpoint("b", types=("other", "t")))
    assert [each.id for each in ledger.subscribed("ann", "t")] == ["a", "b"]
    assert [each.id for each in ledger.subscribed("ann", "other")] == ["b"]
    ledger.change_endpoint(endpoint("a", disabled="gone"))
    assert [each.id for each in ledger.subscribed("ann", "t")] == ["b"]


def test_an_id_is_accepted_once(ledger):
    key = accept(ledger, "a", "1", b"x", Kind.TOOL)
    for _ in range(2):
        assert not ledger.accept(delivery("a", "1", b"x", Kind.TOOL), b"x")
        with pytest.raises(Conflict):
            ledger.accept(delivery("a", "1", b"y", Kind.TOOL), b"y")
        if ledger.pending():
            ledger.end(key, Delivered(ToolResult(True, "r")), 1.0)
    ledger.acknowledge(key)
    assert not ledger.accept(delivery("a", "1", b"x", Kind.TOOL), b"x")
    assert accept(ledger, "b", "1", b"x") != key


def test_what_cannot_be_accepted(ledger):
    with pytest.raises(UnknownEndpoint):
        accept(ledger, "c", "1")
    with pytest.raises(EventTooLarge, match="100 bytes"):
        accept(ledger, "a", "1", bytes(101))
    with pytest.raises(ValueError, match="event id"):
        accept(ledger, "a", "1.2")
    ledger.change_endpoint(endpoint("a", disabled="410"))
    with pytest.raises(EndpointDisabled, match="410"):
        accept(ledger, "a", "1")


def test_what_is_owed_is_bounded_and_events_leave_room_for_calls(ledger):
    for n in range(5):
        accept(ledger, "a", f"{n}")
    for kind in Kind:
        with pytest.raises(OutboxFull, match="endpoint"):
            accept(ledger, "a", "x", kind=kind)
    accept(ledger, "b", "5")
    with pytest.raises(OutboxFull):
        accept(ledger, "b", "6")
    accept(ledger, "b", "6", kind=Kind.TOOL)
    accept(ledger, "b", "7", kind=Kind.TOOL)
    with pytest.raises(OutboxFull):
        accept(ledger, "b", "8", kind=Kind.TOOL)


def test_bytes_that_are_owed_are_bounded_with_what_was_answered(ledger):
    keys = [accept(ledger, "a", f"{n}", bytes(100), Kind.TOOL) for n in range(3)]
    with pytest.raises(OutboxFull):
        accept(ledger, "a", "x", b"x")
    accept(ledger, "a", "3", bytes(50), Kind.TOOL)
    ledger.end(keys[0], Delivered(ToolResult(True, "r" * 90)), 1.0)
    with pytest.raises(OutboxFull):
        accept(ledger, "b", "x", bytes(10), Kind.TOOL)
    ledger.acknowledge(keys[0])
    accept(ledger, "b", "x", bytes(100), Kind.TOOL)


def test_a_calls_end_is_kept_until_it_was_heard(ledger):
    key = accept(ledger, "a", "1", kind=Kind.TOOL)
    ledger.attempted(key, Attempt(0.0, 1.0, 500, "status 500"), 5.0)
    ledger.end(key, Delivered(ToolResult(True, "secret answer")), 6.0, Attempt(5.0, 1.0, 200))
    (ended,) = ledger.unacknowledged()
    assert ended.tries == 2
    assert ended.ending == Delivered(ToolResult(True, "secret answer"))
    assert ledger.acknowledge(key)
    assert not ledger.acknowledge(key)
    logged = ledger.delivery(key)
    assert (logged.state, logged.ending) == (State.LOGGED, Delivered())
    assert [attempt.status for attempt in logged.attempts] == [500, 200]


def test_an_event_is_logged_when_it_ends_and_so_is_a_call_that_was_withdrawn(ledger):
    event, call = accept(ledger, "a", "1"), accept(ledger, "a", "2", kind=Kind.TOOL)
    ledger.end(event, Delivered(), 1.0)
    ledger.end(call, GaveUp(Why.WITHDRAWN), 1.0)
    assert ledger.unacknowledged() == ledger.pending() == []
    assert [logged.event for logged in ledger.of_endpoint("a")] == ["2", "1"]


def test_the_log_is_bounded(ledger):
    for n in range(5):
        ledger.end(accept(ledger, "a", f"{n}"), Delivered(), n)
        ledger.check()
    assert [logged.event for logged in ledger.of_endpoint("a")] == ["4", "3", "2"]
    for n in range(3):
        ledger.end(accept(ledger, "b", f"{n}", bytes(90)), GaveUp(Why.EXHAUSTED, "x" * 999), n)
        ledger.check()
    assert [logged.event for logged in ledger.of_endpoint("b")] == ["2", "1"]
    assert len(ledger.of_endpoint("b")[0].ending.detail) == 300
    with pytest.raises(UnknownDelivery):
        ledger.delivery(Key("a", "4"))


def test_attempts_that_are_remembered_are_bounded(ledger):
    key = accept(ledger, "a", "1")
    for n in range(50):
        ledger.attempted(key, Attempt(n, 0.0), n)
    assert ledger.delivery(key).tries == 50
    assert [attempt.at for attempt in ledger.delivery(key).attempts] == list(range(30, 50))


def test_a_replay_has_the_same_id_and_body_and_is_nobodys_call(ledger):
    key = accept(ledger, "a", "1", b"body", Kind.TOOL)
    with pytest.raises(Conflict):
        ledger.replay(key, 9.0)
    ledger.end(key, GaveUp(Why.DEADLINE), 1.0, Attempt(0.0, 0.0))
    with pytest.raises(Conflict):
        ledger.replay(key, 9.0)
    ledger.acknowledge(key)
    ledger.replay(key, 9.0)
    (again,) = ledger.pending()
    assert (again.key, again.began, again.tries, again.replays) == (key, 9.0, 0, 1)
    assert len(again.attempts) == 1
    assert ledger.body(key) == b"body"
    ledger.end(key, Delivered(), 10.0)
    assert ledger.unacknowledged() == []
    was = ledger.replay(key, 11.0)
    ledger.unreplay(was)
    assert ledger.delivery(key) == was
    with pytest.raises(UnknownDelivery):
        ledger.replay(Key("a", "2"), 9.0)


def test_a_disabled_endpoints_pending_deliveries_end(ledger):
    event, call = accept(ledger, "a", "1"), accept(ledger, "a", "2", kind=Kind.TOOL)
    other = accept(ledger, "b", "1")
    ended = ledger.close_endpoint("a", Why.ENDPOINT_DISABLED, "410", 5.0)
    assert [each.key for each in ended] == [event, call]
    assert [each.key for each in ledger.unacknowledged()] == [call]
    assert [each.key for each in ledger.pending()] == [other]


def test_a_deleted_endpoints_log_goes_and_its_calls_are_still_told(ledger):
    ledger.end(accept(ledger, "a", "1"), Delivered(), 0.0)
    call = accept(ledger, "a", "2", kind=Kind.TOOL)
    ledger.remove_endpoint("a", 5.0)
    assert [each.key for each in ledger.unacknowledged()] == [call]
    ledger.check()
    assert ledger.acknowledge(call)
    assert ledger.find(call) is None
    with pytest.raises(UnknownEndpoint):
        ledger.endpoint("a")


def test_a_ledger_of_kept_records_is_the_same(ledger):
    accept(ledger, "a", "1", b"1")
    ledger.end(accept(ledger, "a", "2", b"2", Kind.TOOL), Delivered(ToolResult(True, "r")), 1.0)
    ledger.end(accept(ledger, "b", "3", b"3"), GaveUp(Why.EXHAUSTED), 2.0)
    again = restored(ledger, 3.0)
    assert dict(again.everything()) == dict(ledger.everything())
    assert again.take_touched() == []


def restored(ledger, now, without=()):
    kept = [
        (msgspec.msgpack.decode(msgspec.msgpack.encode(thing), type=Delivery), ledger.body(name))
        for name, thing in ledger.everything()
        if isinstance(thing, Delivery)
    ]
    made = Ledger(LIMITS)
    endpoints = [each for each in ledger.endpoints.values() if each.id not in without]
    made.restore(endpoints, kept, now)
    made.check()
    return made


def test_what_is_owed_to_an_endpoint_that_was_lost_ends(ledger):
    accept(ledger, "a", "1")
    call = accept(ledger, "a", "2", kind=Kind.TOOL)
    ledger.end(accept(ledger, "a", "3"), Delivered(), 1.0)
    again = restored(ledger, 3.0, without="a")
    (told,) = again.unacknowledged()
    assert (told.key, told.ending.why) == (call, Why.ENDPOINT_DELETED)
    assert again.pending() == []
    assert {name.event for name, thing in again.take_touched() if thing is None} == {"1", "3"}


def test_a_clock_that_was_set_back_delays_nothing(ledger):
    key = Key("a", "1")
    ledger.accept(delivery("a", "1", kind=Kind.TOOL, now=1000.0), b"")
    ledger.attempted(key, Attempt(1000.0, 0.0), 1005.0)
    again = restored(ledger, 10.0).delivery(key)
    assert (again.began, again.next_at, again.deadline) == (10.0, 15.0, 60.0 - 990.0)
    assert restored(ledger, 1000.0).delivery(key) == ledger.delivery(key)


def test_no_owner_takes_the_room_of_others():
    ledger = Ledger(
        OutboxLimits(owed=16, owed_bytes=1600, logged=6, logged_bytes=10_000, logged_of_endpoint=4)
    )
    for name, owner in [("a", "ann"), ("b", "ann"), ("c", "bob")]:
        ledger.add_endpoint(endpoint(name, owner))

    def take(name, event, size=0, kind=Kind.LIFECYCLE):
        owner = ledger.endpoint(name).owner
        given = msgspec.structs.replace(delivery(name, event, bytes(size), kind), owner=owner)
        assert ledger.accept(given, bytes(size))
        ledger.check()
        return given.key

    for n in range(6):
        take("ab"[n % 2], str(n))
    with pytest.raises(OutboxFull):
        take("b", "6")
    take("b", "6", kind=Kind.TOOL)
    take("b", "7", kind=Kind.TOOL)
    with pytest.raises(OutboxFull):
        take("a", "8", kind=Kind.TOOL)
    with pytest.raises(OutboxFull):
        take("c", "0", 801, kind=Kind.TOOL)
    first = take("c", "0", 600)
    ledger.end(first, Delivered(), 0.0)
    for pending in ledger.pending():
        ledger.end(pending.key, Delivered(), 0.0)
        for told in ledger.unacknowledged():
            ledger.acknowledge(told.key)
        ledger.check()
    assert len(ledger.of_endpoint("a")) + len(ledger.of_endpoint("b")) == 5
    assert ledger.delivery(first)  # the oldest, but its owner has least


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("size", [0, 900])
def test_many_owners_together_leave_room_for_one_more(kind, size):
    """Each takes all that he can get; whoever comes then has endpoints, and events or calls, all the same."""
    ledger = Ledger(OutboxLimits(endpoints=200, owed=2000, owed_bytes=200_000, owed_to_endpoint=2000))

    def taken(make):
        for number in range(2001):
            try:
                make(number)
            except OutboxFull:
                return number
        raise AssertionError("there is no bound")

    for number in range(6):
        owner = f"o{number}"

        def owe(n, owner=owner):
            given = delivery(f"{owner}-0", str(n), bytes(size), kind)
            ledger.accept(msgspec.structs.replace(given, owner=owner), bytes(size))

        assert taken(lambda n, owner=owner: ledger.add_endpoint(endpoint(f"{owner}-{n}", owner)))
        assert taken(owe)
    ledger.check()
