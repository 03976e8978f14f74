"""A turn is told whole, in order and once, wherever its connections break and whatever the server forgets."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from agentserve.client.protocol import events as told
from agentserve.client.protocol.errors import BadReply, NotFound, StreamLost
from agentserve.client.protocol.flow import Broken, Means, Pause, Reply, Retry
from agentserve.client.protocol.follow import Open, Read, resume_turn, run_turn
from tests.client_past import MEANS, PastServer, Told, drive, recorded

Events = list[dict[str, Any]]


@pytest.fixture
async def past() -> Events:
    return await recorded()


def run(server: PastServer, after: PastServer | None = None) -> Told:
    return drive(run_turn("sess_1", "Weather?", MEANS), server, after=after)


def check(got: Told, whole: Told) -> None:
    """What was lost and found again comes to the same as what was not lost."""
    texts: dict[str, str] = {}
    ends: dict[str, str] = {}
    dropped: set[str] = set()
    for event in got.events:
        if isinstance(event, told.TextDelta | told.ReasoningDelta):
            assert event.item not in ends
            texts[event.item] = texts.get(event.item, "") + event.text
        elif isinstance(event, told.Message | told.Reasoning):
            assert event.item not in ends
            ends[event.item] = event.text
        elif isinstance(event, told.Resynced):
            dropped |= set(event.dropped)
    assert {item: text for item, text in texts.items() if item not in dropped} == ends

    def others(each: Told) -> list[Any]:
        kinds = (told.ToolCalled, told.ToolReturned, told.TurnStarted, told.TurnEnded)
        return [event for event in each.events if isinstance(event, kinds)]

    assert others(got)[0] == others(whole)[0]
    assert others(got)[-1] == others(whole)[-1] == got.events[-1]
    assert sorted(map(repr, others(got))) == sorted(map(repr, others(whole)))
    assert {call.id for call in got.run} <= {call.id for call in whole.run}
    assert len({call.id for call in got.run}) == len(got.run)
    assert got.result is not None
    assert whole.result is not None
    assert (got.result.text, got.result.status, got.result.usage) == (
        whole.result.text,
        whole.result.status,
        whole.result.usage,
    )
    assert sorted(map(_what, got.result.items)) == sorted(map(_what, whole.result.items))


def _what(item: dict[str, Any]) -> str:
    return json.dumps({key: value for key, value in item.items() if key != "id"}, sort_keys=True)


def test_a_turn_that_nothing_disturbs(past: Events) -> None:
    got = run(PastServer(past))
    assert got.result is not None
    assert got.result.text == "It rains."
    assert [call.name for call in got.run] == ["weather", "now"]
    assert got.events[0] == told.TurnStarted(got.result.turn)
    assert isinstance(got.events[-1], told.TurnEnded)
    names = [type(event).__name__ for event in got.events]
    assert [name for name, _ in itertools.groupby(names)] == [
        "TurnStarted",
        "ReasoningDelta",
        "Reasoning",
        "TextDelta",
        "Message",
        "ToolCalled",
        "ToolReturned",
        "TextDelta",
        "Message",
        "TurnEnded",
    ]
    check(got, got)


def test_the_turn_of_another_client_is_passed_over(past: Events) -> None:
    """It ran when the stream was opened, or began and ended before the message came."""
    whole = run(PastServer(past))
    assert whole.result is not None
    turn = whole.result.turn
    name, _, first = past[0]["event_id"].rpartition("-")
    other = json.loads(json.dumps(past).replace(turn, "turn_other").replace("msg_", "msg_0"))
    for begin in (0, len(other) // 2):
        both = [*other[begin:], *past]
        told_ids = [{**event, "event_id": f"{name}-{int(first) + i}"} for i, event in enumerate(both)]
        got = run(PastServer(told_ids, turn=turn))
        assert (got.events, got.run, got.result) == (whole.events, whole.run, whole.result)


@pytest.mark.parametrize("named", [True, False])
def test_cut_after_every_event(past: Events, named: bool) -> None:
    whole = run(PastServer(past))
    assert whole.result is not None
    turn = whole.result.turn if named else None
    assert run(PastServer(past, turn=turn)) == whole
    for cut in range(len(past) + 2):
        assert run(PastServer(past, [cut], turn=turn)) == whole, cut
    assert run(PastServer(past, [2] * len(past), turn=turn)) == whole  # and one event a connection
    for cut in range(2, len(past), 3):
        assert run(PastServer(past, [cut, 1, 3, 0], turn=turn)) == whole


def test_cut_after_every_byte_and_read_in_small_pieces(past: Events) -> None:
    whole = run(PastServer(past))
    size = sum(len(json.dumps(event)) for event in past)
    for cut in range(0, size, 97):
        assert run(PastServer(past, [cut], cut_bytes=True)) == whole, cut
    assert run(PastServer(past, bytes_each=1)) == whole


def test_the_places_that_are_asked_for(past: Events) -> None:
    server = PastServer(past, [4, 1])
    run(server)
    assert server.opened == [None, server.id(2), server.id(2)]  # a comment is no event


def test_events_that_are_gone_are_found_in_lists(past: Events) -> None:
    """Cut after every event, and all up to every later one forgotten."""
    whole = run(PastServer(past))
    for cut in range(2, len(past)):
        for gone in range(cut, len(past) + 1, 2):
            server = PastServer(past, [cut], forgets=lambda place, gone=gone: gone)
            server.answer = _advanced(server, gone)  # type: ignore[method-assign]
            got = run(server)
            assert any(isinstance(event, told.Resynced) for event in got.events)
            check(got, whole)


def _advanced(server: PastServer, gone: int) -> Any:
    answer = server.answer

    def later(request: Any) -> Reply:
        if request.method == "GET":
            server.now = max(server.now, gone)
        return answer(request)

    return later


def test_a_server_that_says_no_places(past: Events) -> None:
    whole = run(PastServer(past))
    for cut in range(len(past)):
        check(run(PastServer(past, [cut], places=False)), whole)
    for unheard in range(1, len(past) + 1):
        server = PastServer(past, [0], places=False, unheard=unheard)
        check(run(server), whole)
        assert server.opened == [None, None]


def test_a_server_that_dies_over_an_item_says_it_anew(past: Events) -> None:
    whole = run(PastServer(past))
    last = max(i for i, event in enumerate(past) if event["type"] == "agent.session.turn.item.added")
    item = past[last]["item"]["id"]
    for cut in range(last, len(past) - 2):
        anew = [
            json.loads(json.dumps(event).replace(item, "msg_new").replace(PastServer(past).name, "feed"))
            for event in past[last:]
        ]
        before = [json.loads(json.dumps(e).replace(PastServer(past).name, "feed")) for e in past[:last]]
        after = PastServer(before + anew, forgets=lambda place: last)
        after.now = last
        got = run(PastServer(past, [cut + 1]), after)
        (synced,) = [event for event in got.events if isinstance(event, told.Resynced)]
        assert synced.dropped == ((item,) if cut > last else ())
        check(got, whole)


def test_a_turn_is_taken_up_by_another_client(past: Events) -> None:
    whole = run(PastServer(past))
    for now in range(1, len(past) + 1):
        server = PastServer(past)
        server.now = now
        got = drive(resume_turn("sess_1", MEANS), server)
        check(got, whole)


def test_events_that_come_twice_and_of_other_turns(past: Events) -> None:
    whole = run(PastServer(past))
    twice = [event for event in past for _ in range(2)]
    foreign = {"type": "agent.session.turn.output_text.delta", "event_id": "x-1", "turn_id": "turn_0"}
    assert run(PastServer([*twice[:9], {**foreign, "item_id": "i", "delta": "no"}, *twice[9:]])) == whole


def test_calls_that_are_told_again_run_once(past: Events) -> None:
    """As a server does that was started again, or one that waits for what is left."""
    whole = run(PastServer(past))
    (at,) = [i for i, event in enumerate(past) if event["type"] == "agent.session.requires_action"]
    again = {**past[at], "event_id": "z-1"}
    got = run(PastServer([*past[: at + 1], again, *past[at + 1 :]]))
    assert got == whole
    assert len(got.run) == 2
    (call,) = again["session"]["required_actions"][:1]
    other = {**again, "session": {**again["session"], "required_actions": [{**call, "turn_id": "turn_x"}]}}
    assert run(PastServer([*past[:at], other, *past[at:]])) == whole


def test_a_result_that_a_server_tells_by_another_id_after_its_death(past: Events) -> None:
    whole = run(PastServer(past))
    outputs = [i for i, e in enumerate(past) if e.get("item", {}).get("type") == "function_call_output"]
    for at in outputs:
        item = {**past[at]["item"], "id": "fco_new"}
        again = {**past[at], "event_id": "z-1", "item": item}
        got = run(PastServer([*past[: at + 1], again, *past[at + 1 :]]))
        assert got.events == whole.events
        assert got.result is not None
        assert whole.result is not None
        assert len(got.result.items) == len(whole.result.items)
        assert item in got.result.items


def test_an_end_that_was_not_told(past: Events) -> None:
    """The session rests, and of how its turn ended nothing was said."""
    whole = run(PastServer(past))
    (end,) = [i for i, event in enumerate(past) if event["type"] == "agent.session.turn.completed"]
    server = PastServer([event for i, event in enumerate(past) if i != end])
    past_turn, answer = past[end]["turn"], server.answer

    def answered(request: Any) -> Reply:
        server.now = len(past)
        if "/turns/" in request.path and not request.path.endswith("/items"):
            return Reply(200, {}, json.dumps(past_turn).encode())
        return answer(request)

    server.answer = answered  # type: ignore[method-assign]
    check(run(server), whole)


def test_what_it_does_not_know_is_handed_on(past: Events) -> None:
    new = {"type": "agent.session.turn.dance", "event_id": "y-1", "turn_id": past[0]["turn_id"]}
    got = run(PastServer([past[0], new, *past[1:]]))
    assert told.Other("agent.session.turn.dance", new) in got.events


@pytest.mark.parametrize(
    "bad",
    [b"data: nope\n\n", b"data: []\n\n", b'data: {"type": "agent.session.turn.created"}\n\n'],
)
def test_nonsense_is_told_as_such(bad: bytes) -> None:
    flow = run_turn("sess_1", "x", MEANS)
    assert isinstance(flow.send(None), Open)
    flow.send(Reply(200, {}, b""))
    assert isinstance(flow.send(Reply(202, {}, b"")), Read)
    with pytest.raises(BadReply):
        flow.send(bad)


def test_it_gives_up_after_its_patience_and_at_once_where_trying_is_no_use(past: Events) -> None:
    means = Means(Retry(first=1.0, longest=4.0, patience=20.0), lambda: 1.0 - 2**-53, lambda: "key")
    flow = run_turn("sess_1", "x", means)
    flow.send(None)
    slept: list[float] = []

    def wait() -> None:
        while True:
            effect = flow.send(Broken("no route", sent=False))
            assert isinstance(effect, Pause)
            slept.append(effect.seconds)
            flow.send(None)

    with pytest.raises(StreamLost, match="no route"):
        wait()
    assert slept == pytest.approx([1, 2, 4, 4, 4, 4])
    flow = run_turn("sess_1", "x", means)
    flow.send(None)
    with pytest.raises(NotFound):
        flow.send(Reply(404, {}, b'{"error": {"message": "No session", "code": "session_not_found"}}'))


def test_every_event_is_progress(past: Events) -> None:
    """A server behind a proxy that cuts all the time is followed to the end."""
    means = Means(Retry(first=1.0, longest=1.0, patience=1.0), lambda: 0.0, lambda: "key")
    got = drive(run_turn("sess_1", "x", means), PastServer(past, [2] * len(past)))
    assert got.result is not None
    assert isinstance(got.events[-1], told.TurnEnded)
