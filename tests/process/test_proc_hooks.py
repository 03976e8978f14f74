"""Webhook tools on real disks and a real network: the server is killed, receivers misbehave, clocks are set,
and each call has one effect and one result or a defined error."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agents_machine import shown
from tests.agents_rig import CANCEL
from tests.hooks_rig import ENDPOINTS, webhook_tool
from tests.process.hooks_life import PATIENCE, Server, free_port
from tests.process.test_proc_webhooks import Receiver

pytestmark = pytest.mark.process

EVENTS = [f"agent.session.{kind}" for kind in ("created", "in_progress", "idle")]
STEPS = ("publish", "turn", "said", "accept", "attempt", "end", "held", "item", "over")
POINTS = [f"{step}.{side}" for step in STEPS for side in ("before", "after")]


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def receivers() -> Iterator[Callable[..., Receiver]]:
    """More of them."""
    made: list[Receiver] = []

    def one_more(port: int = 0) -> Receiver:
        made.append(Receiver(port))
        return made[-1]

    yield one_more
    for one in made:
        one.close()


@pytest.fixture
def server(tmp_path: Path, receiver: Receiver) -> Iterator[Server]:
    receiver.got()
    made = Server(tmp_path, receiver)
    yield made
    made.kill()


@pytest.fixture(scope="module")
def undisturbed(receiver: Receiver, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[str]]:
    server = Server(tmp_path_factory.mktemp("undisturbed"), receiver)
    session = server.session(webhook_tool(server.endpoint("good")))
    server.ask(session)
    items = shown(server.items(session))
    server.kill()
    return items, server.prompts()


def calls_of(got: list[list[str]]) -> dict[str, set[str]]:
    """Ids of events, by session and call, of requests that were signed rightly."""
    seen: dict[str, set[str]] = {}
    for path, id_, content, right in got:
        if path == "/events":
            continue
        data = json.loads(content)["data"]
        assert right == "right\n"
        call = data["required_action"].get("call_id", "")
        seen.setdefault(f"{data['id']} {call}", set()).add(id_)
    return seen


@pytest.mark.parametrize("point", [*POINTS, "acknowledge.after"])
def test_a_server_that_is_killed_at_a_point(
    receiver: Receiver, undisturbed: tuple[Any, list[str]], server: Server, point: str
) -> None:
    before = receiver.effects()
    events = server.endpoint("events", event_types=EVENTS)
    session = server.session(webhook_tool(server.endpoint("good")))
    created = receiver.lines.get(timeout=PATIENCE).split(maxsplit=3)
    server.nothing_owed()
    server.kill()
    server.start(point)
    server.follow(session)
    server.ask(session)
    server.died()
    server.start()
    items = server.items(session)
    assert (shown(items), list(dict.fromkeys(server.prompts()))) == undisturbed
    server.check_told(items)
    server.until(lambda: [one["status"] for one in server.deliveries(events)] == ["delivered"] * len(EVENTS))
    server.nothing_owed()
    got = [created, *receiver.got()]
    told = {(json.loads(body)["type"], id_) for path, id_, body, _ in got if path == "/events"}
    assert sorted(kind for kind, _ in told) == sorted(EVENTS)  # each is one, however often it came
    assert [len(ids) for ids in calls_of(got).values()] == [1]
    assert set((receiver.effects() - before).values()) == {1}
    assert len(receiver.effects() - before) == len(EVENTS) + 1


def callback_of(receiver: Receiver) -> tuple[str, str]:
    """Where the result of the call goes that comes next, and its event's id."""
    event = json.loads(receiver.lines.get(timeout=PATIENCE).split(maxsplit=3)[2])
    return event["data"]["required_action"]["callback_url"], event["id"]


def test_a_result_that_is_posted_to_the_next_server(
    receiver: Receiver, undisturbed: tuple[Any, list[str]], server: Server
) -> None:
    endpoint = server.endpoint("later", payload="full")
    session = server.session(webhook_tool(endpoint))
    server.follow(session)
    server.ask(session)
    url, event = callback_of(receiver)
    server.until(lambda: server.deliveries(endpoint)[0]["status"] == "delivered")
    for end in (server.kill, server.stop):
        end()
        server.start()
        server.waits(session)
    server.follow(session)
    forged = url[:-4] + "AAAA"
    assert server.client.post(forged, json={"output": "result: forged"}).status_code == 404
    assert server.client.post(url, json={"output": "good"}).status_code == 202
    assert server.client.post(url, json={"output": "good"}).status_code == 202
    server.kill()
    server.start()
    assert server.client.post(url, json={"output": "good"}).status_code == 202
    assert server.client.post(url, json={"output": "sun"}).status_code == 409
    items = server.items(session)
    assert (shown(items), list(dict.fromkeys(server.prompts()))) == undisturbed
    server.check_told(items)
    assert {id_ for _, id_, *_ in receiver.got()} <= {event}  # the first kill may have come too soon


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_reply_to_the_next_server(
    receivers: Callable[..., Receiver], undisturbed: tuple[Any, list[str]], server: Server, end: str
) -> None:
    """While the receiver of one call stands still, and that of the other is away."""
    still, port = receivers(), free_port()
    endpoints = [server.endpoint("good", still), server.endpoint("good", port=port)]
    sessions = [server.session(webhook_tool(endpoint)) for endpoint in endpoints]
    still.fork.signal(signal.SIGSTOP)
    for session in sessions:
        server.ask(session)
        server.waits(session)
    getattr(server, end)()
    server.start()
    for session in sessions:
        server.waits(session)
    still.fork.signal(signal.SIGCONT)
    back = receivers(port)
    back.knows("good", server.secrets[endpoints[1]])
    for session in sessions:
        items = server.items(session)
        assert (shown(items), list(dict.fromkeys(server.prompts()))) == undisturbed
    for one in (still, back):
        assert len({id_ for _, id_, *_ in one.got()}) == 1
        assert list(one.effects().values()) == [1]
    server.nothing_owed()


TIMED_OUT = {"The tool's webhook did not take the call in time.", "The tool did not answer within 2 s."}
RESULTS = {
    "good": {"good"},
    "slow": {"slow"},
    "flaky": {"flaky"},
    "cut": {"whole"},
    "dropped": {"whole"},
    "busy": {"busy"},
    "early": {"early"},
    "mended": {"good"},
    "skewed": TIMED_OUT,
    "hangs": TIMED_OUT,
    "silent": TIMED_OUT,
    "redirect": TIMED_OUT,
    "down": TIMED_OUT,
    "huge": {"The tool's webhook answered with what is no result."},
    "garbage": {"The tool's webhook answered with what is no result."},
    "gone": {"The tool's webhook is disabled."},
    "later": {"posted"},
}
NO_EFFECT = ("skewed", "down")


def test_whatever_receivers_do_and_a_kill_in_the_middle_of_it(receiver: Receiver, server: Server) -> None:
    """Two calls to each, one that the kill hits and one after it; the results of those that take their time
    come in another order, and twice."""
    before, port = receiver.effects(), free_port()
    endpoints = {
        name: server.endpoint(name, port=port if name == "down" else 0, payload="full") for name in RESULTS
    }
    sessions = {
        name: [
            server.session(webhook_tool(endpoint, timeout=2 if RESULTS[name] == TIMED_OUT else 30))
            for _ in range(2)
        ]
        for name, endpoint in endpoints.items()
    }
    for first, _ in sessions.values():
        server.ask(first)
    for name in ("slow", "flaky", "busy", "later"):  # while they are being delivered
        server.rotate(endpoints[name], name)
    server.kill()
    server.start()
    for _, second in sessions.values():
        server.ask(second)
    urls: dict[str, str] = {}  # of the calls whose receiver takes its time
    got: list[list[str]] = []
    while len(urls) < 2:
        got.append(receiver.lines.get(timeout=PATIENCE).split(maxsplit=3))
        data = json.loads(got[-1][2])["data"]
        if got[-1][0] == "/later":
            urls[data["id"]] = data["required_action"]["callback_url"]
    for session in (*reversed(sessions["later"]), *sessions["later"]):
        assert server.client.post(urls[session], json={"output": "posted"}).status_code == 202
    for name, both in sessions.items():
        for session in both:
            assert set(server.outputs(session)) <= RESULTS[name], name
    got += receiver.got()
    right = [one for one in got if one[3] == "right\n"]
    calls = calls_of(right)
    assert all(len(ids) == 1 for ids in calls.values())  # a call is one event, however often it came
    effects = receiver.effects() - before
    assert set(effects) == {id_ for ids in calls.values() for id_ in ids}
    assert set(effects.values()) == {1}
    acted = {call.split()[0] for call in calls}
    for name, both in sessions.items():
        if name != "gone":  # one 410 was for both
            assert acted.issuperset(both) == (name not in NO_EFFECT), name
    server.nothing_owed()
    assert server.client.get(f"{ENDPOINTS}/{endpoints['gone']}").json()["disabled"]


@pytest.mark.parametrize("jump", [-7200.0, 7200.0])
def test_a_clock_that_is_set_while_calls_wait(receiver: Receiver, server: Server, jump: float) -> None:
    """The server's; before and after a kill."""
    later, flaky = server.endpoint("later", payload="full"), server.endpoint("flaky")
    first, second = (server.session(webhook_tool(later, timeout=60)) for _ in range(2))
    server.ask(first)
    url, event = callback_of(receiver)
    server.until(lambda: server.deliveries(later)[0]["status"] == "delivered")
    server.set_clock(jump)
    server.receiver.fork.signal(signal.SIGSTOP)  # attempts fail until it goes on: nothing is lost meanwhile
    server.ask(second)
    server.waits(second)
    server.kill()
    server.start()
    server.receiver.fork.signal(signal.SIGCONT)
    other, other_event = callback_of(receiver)
    while other_event == event:
        other, other_event = callback_of(receiver)
    third = server.session(webhook_tool(flaky, timeout=1))
    for session, where in ((second, other), (first, url)):
        assert server.status(session) == "requires_action"
        assert server.client.post(where, json={"output": "rain"}).status_code == 202
        assert server.outputs(session) == ["rain"]
    server.set_clock(-jump)
    server.ask(third)  # its receiver takes no signature of another time
    assert set(server.outputs(third)) <= {text.replace("2 s", "1 s") for text in TIMED_OUT}
    for _, id_, *_ in receiver.got():
        assert id_ not in {event, other_event} or receiver.effects()[id_] <= 1
    server.nothing_owed()


def test_a_cancel_in_mid_delivery_and_a_kill(receiver: Receiver, server: Server) -> None:
    """Of a turn with two calls, one of which has its result: the session takes the next message."""
    tools = [
        webhook_tool(server.endpoint("good")),
        webhook_tool(server.endpoint("later", payload="full"), name="now"),
    ]
    session = server.session(*tools)
    server.ask(session)
    while (
        json.loads((line := receiver.lines.get(timeout=PATIENCE)).split(maxsplit=3)[2])["data"][
            "required_action"
        ].get("name")
        != "now"
    ):
        pass
    url = json.loads(line.split(maxsplit=3)[2])["data"]["required_action"]["callback_url"]
    server.waits(session)
    server.send(session, CANCEL)
    server.kill()
    server.start()
    assert server.client.post(url, json={"output": "noon"}).status_code == 410
    assert server.status(session) == "idle"
    server.ask(session)
    items = server.items(session)
    assert items[-1]["role"] == "assistant"
    server.nothing_owed()


def test_parallel_calls_whose_results_come_in_any_order_and_to_two_servers(
    receiver: Receiver, server: Server
) -> None:
    later, good = server.endpoint("later", payload="full"), server.endpoint("good")
    tools = [webhook_tool(at, name=name) for at, name in ((later, "weather"), (later, "now"), (good, "date"))]
    session = [server.session(*tools) for _ in range(2)]
    urls: list[dict[str, str]] = []
    for one in session:
        server.ask(one)
        urls.append({})
        while len(urls[-1]) < 2:
            content = receiver.lines.get(timeout=PATIENCE).split(maxsplit=3)[2]
            action = json.loads(content)["data"]["required_action"]
            if "callback_url" in action:
                urls[-1][action["name"]] = action["callback_url"]
    results = {"weather": "rain", "now": "noon"}
    for name in ("weather", "now"):
        assert server.client.post(urls[0][name], json={"output": results[name]}).status_code == 202
    assert server.outputs(session[0]) == ["rain", "noon", "good"]
    undisturbed = server.prompts()[-1]
    assert server.client.post(urls[1]["now"], json={"output": "noon"}).status_code == 202
    server.kill()
    server.start()
    assert server.client.post(urls[1]["now"], json={"output": "noon"}).status_code == 202
    assert server.client.post(urls[1]["weather"], json={"output": "rain"}).status_code == 202
    assert server.outputs(session[1]) == ["rain", "noon", "good"]
    assert server.prompts()[-1] == undisturbed
    assert server.client.post(urls[1]["weather"], json={"output": "sun"}).status_code == 409
    server.nothing_owed()
