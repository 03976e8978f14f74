"""The courier, in virtual time: every call ends once, in a result or a defined error."""

import asyncio

import pytest

from tests.unit.test_webhook_outbox import FakeStore
from tests.webhook_rig import Desk, result, settle
from tools_bridge.webhooks.breaker import BreakerSettings, Circuit
from tools_bridge.webhooks.courier import CourierSettings
from tools_bridge.webhooks.lanes import Places
from tools_bridge.webhooks.ledger import OutboxLimits
from tools_bridge.webhooks.replies import Answered, Failed, Fault
from tools_bridge.webhooks.signing import BadSignature
from tools_bridge.webhooks.store import StorageError
from tools_bridge.webhooks.types import (
    Conflict,
    Delivered,
    Disabled,
    EndpointDisabled,
    GaveUp,
    Key,
    OutboxFull,
    Outcome,
    State,
    ToolResult,
    UnknownEndpoint,
    Why,
)

DOWN = Failed(Fault.CONNECT)


@pytest.fixture
async def desk():
    made = Desk()
    made.courier.start()
    yield made
    await made.close()
    made.outbox.ledger.check()


async def test_a_call_is_delivered_at_once_with_its_result(desk):
    endpoint = await desk.endpoint()
    desk.sender.answer(endpoint.url, result("4 degrees"))
    await desk.call(endpoint)
    await settle()
    assert desk.told() == [Outcome(Key(endpoint.id, "msg_1"), Delivered(ToolResult(True, "4 degrees")))]
    (post,) = desk.sender.posts
    assert (post.url, post.body, post.wants_body) == (endpoint.url, b'{"n":1}', True)
    assert desk.verified(post, desk.secrets[endpoint.id]) == "msg_1"
    desk.courier.acknowledge(Key(endpoint.id, "msg_1"))
    (logged,) = desk.outbox.ledger.of_endpoint(endpoint.id)
    assert [attempt.status for attempt in logged.attempts] == [200]


async def test_failures_are_tried_again_with_one_id_and_stamps_of_their_own(desk):
    endpoint = await desk.endpoint()
    desk.sender.answer(endpoint.url, DOWN, Answered(500), Answered(302), result("x"))
    await desk.call(endpoint, seconds=120)
    await desk.clock.pass_by(100)
    assert [outcome.ending for outcome in desk.told()] == [Delivered(ToolResult(True, "x"))]
    assert set(desk.sender.ids()) == {"msg_1"}
    stamps = [int(post.headers["webhook-timestamp"]) for post in desk.sender.posts]
    assert [stamp - stamps[0] for stamp in stamps] == [0, 1, 6, 21]


async def test_a_receiver_that_answers_later_has_it(desk):
    endpoint = await desk.endpoint()
    desk.sender.answer(endpoint.url, Answered(202))
    await desk.call(endpoint)
    await settle()
    assert [outcome.ending for outcome in desk.told()] == [Delivered(None)]


async def test_a_call_ends_by_its_deadline(desk):
    endpoint = await desk.endpoint()
    desk.sender.answer(endpoint.url, *[DOWN] * 99)
    await desk.call(endpoint, seconds=30)
    await desk.clock.pass_by(30)
    (outcome,) = desk.told()
    assert outcome.ending == GaveUp(Why.DEADLINE, "no connection")
    assert len(desk.sender.posts) == 4
    assert max(post.seconds for post in desk.sender.posts) == 20.0
    assert min(post.seconds for post in desk.sender.posts) == pytest.approx(9.0)


async def test_a_call_whose_time_is_over_is_not_tried(desk):
    endpoint = await desk.endpoint()
    await desk.call(endpoint, seconds=0)
    await settle()
    assert [outcome.ending.why for outcome in desk.told()] == [Why.DEADLINE]
    assert desk.sender.posts == []


async def test_retry_after_beyond_the_deadline_ends_it_at_once(desk):
    endpoint = await desk.endpoint()
    desk.sender.answer(endpoint.url, Answered(503, retry_after="60"))
    await desk.call(endpoint, seconds=60)
    await settle()
    assert [outcome.ending.why for outcome in desk.told()] == [Why.DEADLINE]


async def test_retry_after_holds_the_whole_endpoint(desk):
    endpoint = await desk.endpoint()
    desk.sender.answer(endpoint.url, Answered(429, retry_after="40"))
    await desk.call(endpoint, seconds=100)
    await settle()
    await desk.call(endpoint, "msg_2", seconds=100)
    await desk.clock.pass_by(39)
    assert len(desk.sender.posts) == 1
    await desk.clock.pass_by(6)
    assert desk.sender.ids() == ["msg_1", "msg_2", "msg_1"]
    assert desk.courier.circuit(endpoint.id) is Circuit.CLOSED


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (Answered(200, content_type="text/html", body=b"<p>ok"), Why.BAD_REPLY),
        (Failed(Fault.TOO_LARGE, "large", 200), Why.BAD_REPLY),
        (Failed(Fault.REFUSED, "private"), Why.ADDRESS_REFUSED),
    ],
)
async def test_what_would_be_no_better_again_ends_a_call_at_once(desk, reply, why):
    endpoint = await desk.endpoint()
    desk.sender.answer(endpoint.url, reply)
    await desk.call(endpoint)
    await desk.clock.pass_by(100)
    assert [outcome.ending.why for outcome in desk.told()] == [why]
    assert len(desk.sender.posts) == 1


async def test_410_takes_the_endpoint_out_of_use_with_all_that_is_pending(desk):
    endpoint, other = await desk.endpoint(), await desk.endpoint("other")
    desk.sender.hold(endpoint.url)
    desk.sender.answer(endpoint.url, Answered(410))
    for n in range(6):
        await desk.call(endpoint, f"msg_{n}")
    await desk.call(other, "msg_x")
    await settle()
    assert desk.sender.running == 4
    desk.told()
    desk.sender.held[endpoint.url].set()
    await settle()
    told = desk.told()
    assert told[0] == Disabled(endpoint.id, "410: the receiver wants no more")
    assert {outcome.key.event: outcome.ending.why for outcome in told[1:]} == {
        f"msg_{n}": Why.ENDPOINT_DISABLED for n in range(6)
    }
    assert len(told) == 7
    with pytest.raises(EndpointDisabled):
        await desk.call(endpoint, "msg_7")
    await desk.clock.pass_by(10_000)
    assert len(desk.sender.ids(endpoint.url)) <= 4
    await desk.courier.enable(endpoint.id)
    await desk.call(endpoint, "msg_8")
    await settle()
    assert desk.sender.ids()[-1] == "msg_8"


async def test_events_go_to_all_who_want_them_for_three_days(desk):
    first = await desk.endpoint("first", ["session.idle"])
    second = await desk.endpoint("second", ["session.idle", "x"])
    await desk.endpoint("third", ["x"])
    await desk.endpoint("fourth", ["session.idle"], owner="bob")
    desk.sender.answer(second.url, *[Answered(500)] * 99)
    assert await desk.courier.publish("ann", "evt_1", "session.idle", b"{}") == [first.id, second.id]
    assert await desk.courier.publish("ann", "evt_2", "nothing", b"{}") == []
    await desk.clock.pass_by(4 * 86400)
    assert desk.sender.ids(first.url) == ["evt_1"]
    assert desk.sender.ids(second.url) == ["evt_1"] * 10
    assert {post.wants_body for post in desk.sender.posts} == {False}
    assert desk.told() == []
    (logged,) = desk.outbox.ledger.of_endpoint(second.id)
    assert (logged.state, logged.tries, logged.ending.why) == (State.LOGGED, 10, Why.EXHAUSTED)


async def test_an_event_to_a_refused_address_is_tried_again(desk):
    endpoint = await desk.endpoint(types=["t"])
    desk.sender.answer(endpoint.url, Failed(Fault.REFUSED, "private"))
    await desk.courier.publish("ann", "evt_1", "t", b"{}")
    await desk.clock.pass_by(10)
    assert len(desk.sender.posts) == 2


async def test_through_an_open_circuit_calls_wait_or_end_at_once():
    desk = Desk(settings=CourierSettings(breaker=BreakerSettings(failures=2, cooldown=10.0)))
    desk.courier.start()
    endpoint = await desk.endpoint()
    desk.sender.answer(endpoint.url, DOWN, DOWN)
    await desk.call(endpoint, "msg_1", seconds=500)
    await desk.clock.pass_by(1)
    assert desk.courier.circuit(endpoint.id) is Circuit.OPEN
    await desk.call(endpoint, "msg_short", seconds=5)
    await desk.call(endpoint, "msg_long", seconds=50)
    await settle()
    (told,) = desk.told()
    assert (told.key.event, told.ending.why) == ("msg_short", Why.CIRCUIT_OPEN)
    await desk.clock.pass_by(9)
    assert len(desk.sender.posts) == 2
    desk.sender.hold(endpoint.url)
    await desk.clock.pass_by(1)
    assert desk.sender.running == 1  # one that decides
    desk.sender.held[endpoint.url].set()
    await settle()
    assert {told.key.event for told in desk.told()} == {"msg_1", "msg_long"}
    await desk.close()


async def test_one_slow_endpoint_delays_no_other():
    desk = Desk(settings=CourierSettings(places=Places(each=4, all=16)))
    desk.courier.start()
    slow = [await desk.endpoint(f"slow{n}") for n in range(3)]
    fast = await desk.endpoint("fast")
    for endpoint in slow:
        desk.sender.hold(endpoint.url)
        for n in range(20):
            await desk.call(endpoint, f"msg_{n}", seconds=1000)
    for n in range(50):
        await desk.call(fast, f"msg_{n}", seconds=1000)
    await settle(300)
    assert len([told for told in desk.told() if told.key.endpoint == fast.id]) == 50
    assert desk.sender.most <= 16
    assert desk.courier.owed == 60
    for endpoint in slow:
        desk.sender.held[endpoint.url].set()
    await settle(300)
    assert len(desk.told()) == 60
    await desk.close()


async def test_the_end_cuts_attempts_off_and_the_next_server_goes_on(tmp_path):
    desk = Desk(tmp_path)
    desk.courier.start()
    endpoint = await desk.endpoint()
    desk.sender.hold(endpoint.url)
    await desk.call(endpoint, "msg_1")
    await desk.call(endpoint, "msg_2")
    await settle()
    assert desk.sender.running == 2
    await desk.close()
    assert desk.sender.running == 0
    assert desk.told() == []

    again = Desk(tmp_path, clock=desk.clock)
    again.courier.start()
    await settle()
    assert sorted(again.sender.ids()) == ["msg_1", "msg_2"]
    assert again.verified(again.sender.posts[0], desk.secrets[endpoint.id])
    await again.close()


async def test_an_outcome_is_told_again_until_it_was_heard(tmp_path):
    desk = Desk(tmp_path)
    desk.courier.start()
    endpoint = await desk.endpoint()
    desk.sender.answer(endpoint.url, result("a"), result("b"))
    await desk.call(endpoint, "msg_1")
    await desk.call(endpoint, "msg_2")
    told = [await asyncio.wait_for(desk.courier.outcomes.get(), 60) for _ in range(2)]
    desk.courier.acknowledge(Key(endpoint.id, "msg_1"))
    await desk.close()

    again = Desk(tmp_path, clock=desk.clock)
    again.courier.start()
    assert again.told() == [outcome for outcome in told if outcome.key.event == "msg_2"]
    assert again.sender.posts == []
    await again.call(endpoint, "msg_1")  # it was accepted before: nothing new happens
    await again.call(endpoint, "msg_2")
    await settle()
    assert again.told() == []
    assert again.sender.posts == []
    await again.close()


async def test_a_call_that_is_withdrawn_is_let_go_of_and_has_no_outcome(desk):
    endpoint = await desk.endpoint()
    desk.sender.hold(endpoint.url)
    await desk.call(endpoint)
    await settle()
    assert desk.sender.running == 1
    assert await desk.courier.withdraw(Key(endpoint.id, "msg_1"))
    await settle()
    assert desk.sender.running == 0
    assert not await desk.courier.withdraw(Key(endpoint.id, "msg_1"))
    assert not await desk.courier.withdraw(Key(endpoint.id, "msg_2"))
    await desk.clock.pass_by(1000)
    assert desk.told() == []
    (logged,) = desk.outbox.ledger.of_endpoint(endpoint.id)
    assert logged.ending.why is Why.WITHDRAWN


async def test_a_deleted_endpoint_gets_nothing_more_and_its_calls_end(desk):
    endpoint = await desk.endpoint()
    desk.sender.hold(endpoint.url)
    for n in range(6):
        await desk.call(endpoint, f"msg_{n}")
    await settle()
    await desk.courier.delete(endpoint.id)
    await settle()
    assert desk.sender.running == 0
    told = desk.told()
    assert [outcome.ending.why for outcome in told] == [Why.ENDPOINT_DELETED] * 6
    for outcome in told:
        desk.courier.acknowledge(outcome.key)
    assert desk.courier.owed == 0
    for ask in (
        desk.call(endpoint, "msg_9"),
        desk.courier.delete(endpoint.id),
        desk.courier.disable(endpoint.id, "x"),
    ):
        with pytest.raises(UnknownEndpoint):
            await ask


async def test_an_operator_disables(desk):
    endpoint = await desk.endpoint()
    desk.sender.answer(endpoint.url, DOWN)
    await desk.call(endpoint)
    await settle()
    await desk.courier.disable(endpoint.id, "by an operator")
    await settle()
    assert desk.told()[0] == Disabled(endpoint.id, "by an operator")
    await desk.clock.pass_by(1000)
    assert len(desk.sender.posts) == 1


async def test_a_replay_goes_out_under_the_same_id(desk):
    endpoint = await desk.endpoint()
    desk.sender.answer(endpoint.url, result("x"), Answered(500), Answered(200, body=b"whatever"))
    await desk.call(endpoint)
    await settle()
    key = Key(endpoint.id, "msg_1")
    with pytest.raises(Conflict):
        await desk.courier.replay(key)
    desk.courier.acknowledge(key)
    await desk.courier.replay(key)
    await desk.clock.pass_by(10)
    assert desk.sender.ids() == ["msg_1"] * 3
    assert len({post.body for post in desk.sender.posts}) == 1
    assert len(desk.told()) == 1
    (logged,) = desk.outbox.ledger.of_endpoint(endpoint.id)
    assert (logged.replays, logged.ending, len(logged.attempts)) == (1, Delivered(), 3)


async def test_rotation_in_mid_flight(desk):
    endpoint = await desk.endpoint()
    desk.sender.answer(endpoint.url, DOWN, DOWN)
    await desk.call(endpoint, seconds=100)
    await settle()
    _, new = await desk.outbox.rotate_secret(endpoint.id, keep_seconds=3.0)
    await desk.clock.pass_by(2)
    await desk.clock.pass_by(10)
    (old,) = desk.secrets[endpoint.id]
    first, second, third = desk.sender.posts
    now = desk.clock.unix()
    assert now
    for post, good, bad in ((first, [old], [new]), (second, [old, new], []), (third, [new], [old])):
        for secret in good:
            assert desk.verified(post, [secret]) == "msg_1"
        for secret in bad:
            with pytest.raises(BadSignature):
                desk.verified(post, [secret])


async def test_a_clock_that_is_wrong_moves_stamps_and_nothing_else(desk):
    endpoint = await desk.endpoint()
    desk.sender.answer(endpoint.url, DOWN)
    desk.clock.skew = -3600.0
    await desk.call(endpoint)
    desk.clock.skew = 50.0
    await desk.clock.pass_by(5)
    stamps = [int(post.headers["webhook-timestamp"]) for post in desk.sender.posts]
    assert stamps[1] - stamps[0] == 1
    assert stamps[0] - int(desk.clock.now() - 5) == 50


async def test_a_test_is_one_attempt_that_leaves_nothing(desk):
    endpoint = await desk.endpoint()
    desk.sender.answer(endpoint.url, Answered(500), DOWN)
    assert (await desk.courier.test(endpoint.id, "evt_test", b"{}")).status == 500
    tested = await desk.courier.test(endpoint.id, "evt_test", b"{}")
    assert (tested.status, tested.error) == (None, "no connection")
    assert desk.verified(desk.sender.posts[0], desk.secrets[endpoint.id]) == "evt_test"
    assert desk.outbox.ledger.of_endpoint(endpoint.id) == []
    await desk.clock.pass_by(1000)
    assert len(desk.sender.posts) == 2


async def test_a_sender_that_raises_is_a_failure_like_others(desk):
    def broken():
        raise RuntimeError("odd")

    endpoint = await desk.endpoint()
    desk.sender.answer(endpoint.url, broken, result("x"))
    await desk.call(endpoint)
    await desk.clock.pass_by(2)
    assert [outcome.ending for outcome in desk.told()] == [Delivered(ToolResult(True, "x"))]
    (ended,) = desk.outbox.ledger.of_endpoint(endpoint.id)
    assert ended.attempts[0].error == "internal error: RuntimeError"


async def test_a_disk_that_fails_holds_back_no_outcome(tmp_path):
    desk = Desk(tmp_path)
    desk.courier.start()
    endpoint = await desk.endpoint()
    desk.sender.hold(endpoint.url)
    desk.sender.answer(endpoint.url, result("x"))
    await desk.call(endpoint)
    await settle()

    def full(changes):
        raise StorageError("full")

    write, desk.outbox._store.write = desk.outbox._store.write, full
    desk.sender.held[endpoint.url].set()
    outcome = await asyncio.wait_for(desk.courier.outcomes.get(), 60)
    assert outcome.ending == Delivered(ToolResult(True, "x"))
    desk.outbox._store.write = write
    await desk.close()
    again = Desk(tmp_path, clock=desk.clock)
    assert [found.key for found in again.outbox.ledger.unacknowledged()] == [outcome.key]
    await again.close()


async def test_an_endpoint_that_is_changed_is_tried_anew():
    desk = Desk(settings=CourierSettings(breaker=BreakerSettings(failures=1, cooldown=300.0)))
    desk.courier.start()
    endpoint = await desk.endpoint()
    desk.sender.answer(endpoint.url, DOWN, DOWN)
    await desk.call(endpoint, seconds=1000)
    await settle()
    assert desk.courier.circuit(endpoint.id) is Circuit.OPEN
    assert await desk.courier.update(endpoint.id, name="other")
    await desk.clock.pass_by(2)
    assert len(desk.sender.posts) == 1
    await desk.courier.enable(endpoint.id)
    await desk.clock.pass_by(1)
    assert desk.courier.circuit(endpoint.id) is Circuit.OPEN
    await desk.courier.update(endpoint.id, url="https://new.example/")
    await desk.clock.pass_by(10)
    assert [post.url for post in desk.sender.posts] == [endpoint.url, endpoint.url, "https://new.example/"]
    assert len(desk.told()) == 1
    await desk.close()


async def test_an_endpoint_that_is_owed_too_much_keeps_no_event_from_others():
    desk = Desk(limits=OutboxLimits(owed_to_endpoint=2))
    desk.courier.start()
    full, other = await desk.endpoint("full", ["t"]), await desk.endpoint("other", ["t"])
    desk.sender.hold(full.url)
    for n in range(2):
        assert await desk.courier.publish("ann", f"evt_{n}", "t", b"{}") == [full.id, other.id]
        await settle()
    assert await desk.courier.publish("ann", "evt_2", "t", b"{}") == [other.id]
    await desk.courier.update(other.id, event_types=["u"])
    with pytest.raises(OutboxFull):
        await desk.courier.publish("ann", "evt_3", "t", b"{}")
    await settle()
    assert desk.sender.ids(other.url) == ["evt_0", "evt_1", "evt_2"]
    await desk.close()


async def slow_desk():
    """With a disk that does not go on until it is told to."""
    store = FakeStore()
    desk = Desk(store=store)
    desk.courier.start()
    endpoint = await desk.endpoint()
    await desk.outbox.kept()
    while store.asked.acquire(blocking=False):
        pass
    store.open.clear()
    return desk, store, endpoint


async def test_nothing_is_attempted_before_it_is_kept_and_no_end_is_told_before():
    desk, store, endpoint = await slow_desk()
    desk.sender.answer(endpoint.url, result("x"))
    desk.sender.hold(endpoint.url)
    asked = asyncio.create_task(desk.call(endpoint))
    assert await asyncio.to_thread(store.asked.acquire, timeout=60)
    await settle()
    assert not asked.done()
    assert desk.sender.posts == []
    store.open.set()
    await asked
    await settle()
    store.open.clear()
    desk.sender.held[endpoint.url].set()
    assert await asyncio.to_thread(store.asked.acquire, timeout=60)
    await settle()
    assert desk.sender.ids() == ["msg_1"]
    assert desk.told() == []
    store.open.set()
    assert isinstance(await asyncio.wait_for(desk.courier.outcomes.get(), 60), Outcome)
    await desk.close()


@pytest.mark.parametrize("end", ["withdraw", "disable", "delete"])
async def test_what_ends_while_the_disk_is_waited_for_is_not_attempted(end):
    desk, store, endpoint = await slow_desk()
    asked = asyncio.create_task(desk.call(endpoint))
    await settle()
    ended = asyncio.create_task(
        {
            "withdraw": lambda: desk.courier.withdraw(Key(endpoint.id, "msg_1")),
            "disable": lambda: desk.courier.disable(endpoint.id, "x"),
            "delete": lambda: desk.courier.delete(endpoint.id),
        }[end]()
    )
    await settle()
    store.open.set()
    await asyncio.gather(asked, ended)
    await desk.outbox.kept()
    await settle()
    assert desk.sender.posts == []
    assert desk.courier.owed == 0
    assert len([told for told in desk.told() if isinstance(told, Outcome)]) == (end != "withdraw")
    await desk.close()
