"""What is sent again, when, and what becomes of answers: over a transport that is made up."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest

from agentserve.client import (
    AsyncClient,
    BadReply,
    BadRequest,
    Client,
    ClientError,
    Conflict,
    ConnectionFailed,
    Forbidden,
    NotFound,
    RateLimited,
    Retry,
    ServerFailed,
    StatusError,
    TooLarge,
    Unauthorized,
    Unprocessable,
)
from agentserve.client.protocol import calls
from agentserve.client.protocol.calls import Outcome
from agentserve.client.protocol.flow import Broken, Delays, Means, Pause, Reply, Request, asked

RETRY = Retry(first=1.0, longest=8.0, patience=30.0)
SESSION = {"id": "sess_1", "object": "agent.session", "status": "idle", "agent": {"model": "m"}}
Answers = Sequence[Reply | Broken]


def means(draw: Callable[[], float] = lambda: 0.0) -> Means:
    keys = iter(map(str, range(99)))
    return Means(RETRY, draw, lambda: next(keys))


def reply(status: int, body: Any = None, **headers: str) -> Reply:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply(status, named, b"" if body is None else json.dumps(body).encode())


def refusal(status: int, message: str = "No.", code: str | None = None, **headers: str) -> Reply:
    return reply(status, {"error": {"message": message, "code": code, "more": 7}}, **headers)


def played(flow: Any, answers: Answers) -> tuple[Any, list[Request], list[float]]:
    """What a flow comes to (its value or what it raises), what it sent and how long it slept."""
    left, sent, slept = list(answers), [], []
    got: Any = None
    try:
        while True:
            effect = flow.send(got)
            if isinstance(effect, Pause):
                slept.append(effect.seconds)
                got = None
            else:
                sent.append(effect)
                got = left.pop(0) if len(left) > 1 else left[0]
    except StopIteration as stop:
        return stop.value, sent, slept
    except ClientError as error:
        return error, sent, slept


GET = Request("GET", "/x")
POST = Request("POST", "/x", {}, repeatable=False)


@pytest.mark.parametrize(
    ("request_", "answer", "again"),
    [
        (GET, Broken("reset"), True),
        (POST, Broken("reset"), False),
        (POST, Broken("refused", sent=False), True),
        (GET, refusal(503), True),
        (POST, refusal(503), False),
        (GET, refusal(500), True),
        (POST, refusal(429), True),
        (GET, refusal(408), True),
        (GET, refusal(409), False),
        (GET, refusal(409, x_should_retry="true"), True),
        (GET, refusal(429, x_should_retry="false"), False),
        (GET, refusal(400), False),
        (GET, refusal(404), False),
    ],
)
def test_what_is_sent_again(request_: Request, answer: Reply | Broken, again: bool) -> None:
    got, sent, _ = played(asked(request_, means()), [answer, reply(200, {"ok": 1})])
    assert len(sent) == 1 + again
    assert isinstance(got, Reply) == again
    assert len(set(map(id, sent))) == 1  # the same request, with its key


def test_what_a_lost_try_had_done() -> None:
    gone = refusal(404)
    for lost in (Broken("reset"), refusal(502)):
        got, sent, _ = played(calls.delete_session("s", means()), [lost, gone])
        assert (got, len(sent)) == (None, 2)
    got, sent, slept = played(calls.delete_session("s", means()), [gone])
    assert isinstance(got, NotFound)
    got, sent, slept = played(calls.delete_session("s", means().once()), [Broken("reset")])
    assert isinstance(got, ConnectionFailed)
    assert (len(sent), slept) == (1, [])


def test_pauses_double_are_drawn_and_bounded() -> None:
    for draw, first in ((lambda: 0.0, [0.5, 1, 2, 4, 4]), (lambda: 0.999999, [1, 2, 4, 8, 8])):
        error, _, slept = played(asked(GET, means(draw)), [Broken("down")])
        assert isinstance(error, ConnectionFailed)
        assert slept[:5] == pytest.approx(first, rel=1e-3)
        assert RETRY.patience - RETRY.longest < sum(slept) <= RETRY.patience
    delays = Delays(RETRY, lambda: 0.0)
    assert [delays.next(), delays.next(3.0)] == [0.5, 3.0]
    assert delays.next(40.0) is None
    delays.progress()
    assert delays.next() == 0.5
    with pytest.raises(ValueError, match="patience"):
        Retry(patience=-1)


def test_retry_after_is_kept_to() -> None:
    _, _, slept = played(asked(GET, means()), [refusal(429, retry_after="5"), reply(200)])
    assert slept == [5.0]
    error, sent, _ = played(asked(GET, means()), [refusal(503, retry_after="3600")])
    assert isinstance(error, ServerFailed)  # longer than it would wait
    assert len(sent) == 1
    _, _, slept = played(asked(GET, means()), [refusal(503, retry_after="Wed, 21 Oct"), reply(200)])
    assert slept == [0.5]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, BadRequest),
        (401, Unauthorized),
        (403, Forbidden),
        (404, NotFound),
        (409, Conflict),
        (413, TooLarge),
        (418, StatusError),
        (422, Unprocessable),
        (429, RateLimited),
        (503, ServerFailed),
    ],
)
def test_errors_by_status(status: int, kind: type[StatusError]) -> None:
    error, _, _ = played(asked(GET, means()), [refusal(status, "Told.", "why", x_should_retry="false")])
    assert type(error) is kind
    assert (error.status, error.code, error.message, error.details["more"]) == (status, "why", "Told.", 7)
    error, _, _ = played(asked(GET, means()), [Reply(status, {"x-should-retry": "false"}, b"<html>")])
    assert type(error) is kind
    assert "<html>" in str(error)


def test_a_result_that_is_too_early_too_long_or_too_late() -> None:
    def given(*answers: Reply) -> tuple[Any, list[Any], list[float]]:
        flow = calls.give("s", "t", "c", Outcome("x" * 9), means())
        got, sent, slept = played(flow, answers)
        return got, [(request.body or {})["events"][0] for request in sent], slept

    unknown = refusal(400, "Unknown pending tool call: c")
    got, sent, slept = given(unknown, unknown, reply(202))
    assert (got, len(sent), slept) == (None, 3, [0.1, 0.3])
    got, sent, _ = given(unknown)
    assert isinstance(got, BadRequest)
    assert len(sent) == 5
    assert calls.final_refusal(got)
    for refused in (refusal(400, code="context_length_exceeded"), refusal(413)):
        got, sent, _ = given(refused, reply(202))
        assert got is None
        assert [event["success"] for event in sent] == [True, False]
        assert sent[1]["error"] == calls.TOO_LONG
        assert isinstance(given(refused)[0], StatusError)  # that as well
    assert isinstance(given(refusal(409, code="result_conflict"))[0], Conflict)


# --- through httpx --------------------------------------------------------------------------

Step = Exception | tuple[int, Any]  # a body: bytes, or JSON


class Line:
    """A transport that answers in order, and keeps what it was sent."""

    def __init__(self, *steps: Step) -> None:
        self.steps = list(steps)
        self.sent: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.sent.append(request)
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        status, body = step
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.Response(status, content=content)

    async def both(self, act: Callable[[Any], Any]) -> tuple[Any, Any]:
        """What both clients make of it."""
        retry = Retry(first=1e-4, longest=1e-3, patience=0.05)
        steps = list(self.steps)
        with httpx.Client(transport=httpx.MockTransport(self)) as http:
            client = Client("http://x/v1", api_key="k", retry=retry, http=http)
            one = _caught(lambda: act(client))
            client.close()
            assert not http.is_closed  # it is not the client's
        self.steps = steps
        async with httpx.AsyncClient(transport=httpx.MockTransport(self)) as http_:
            async with AsyncClient("http://x/", api_key="k", retry=retry, http=http_) as async_client:
                try:
                    two = await act(async_client)
                except ClientError as error:
                    two = error
            assert not http_.is_closed
        return one, two


def _caught(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except ClientError as error:
        return error


TRANSPORT = [
    httpx.ConnectError("no"),
    httpx.ConnectTimeout("no"),
    httpx.ReadTimeout("no"),
    httpx.ReadError("no"),
    httpx.WriteError("no"),
    httpx.RemoteProtocolError("no"),
    httpx.PoolTimeout("no"),
]


@pytest.mark.parametrize("error", TRANSPORT, ids=lambda error: type(error).__name__)
async def test_a_broken_connection_and_the_same_key(error: Exception) -> None:
    line = Line(error, (503, b"busy"), (200, SESSION))
    one, two = await line.both(lambda client: client.sessions.create("m", instructions="Hm."))
    assert one.id == two.id == "sess_1"
    keys = [request.headers["idempotency-key"] for request in line.sent]
    assert keys[0] == keys[1] == keys[2] != keys[3] == keys[4] == keys[5]
    assert {str(request.url) for request in line.sent} == {"http://x/v1/agents/sessions"}
    assert {request.headers["authorization"] for request in line.sent} == {"Bearer k"}
    assert json.loads(line.sent[0].content)["agent"] == {"model": "m", "instructions": "Hm.", "tools": []}


@pytest.mark.parametrize("error", TRANSPORT, ids=lambda error: type(error).__name__)
async def test_a_fork_is_not_made_twice(error: Exception) -> None:
    line = Line((200, SESSION), error, (201, {"id": "f"}))

    def act(client: Any) -> Any:
        if isinstance(client, Client):
            return client.sessions.get("sess_1").fork()

        async def forked() -> Any:
            return await (await client.sessions.get("sess_1")).fork()

        return forked()

    for got in await line.both(act):
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout):
            assert got.id == "f"
        else:
            assert isinstance(got, ConnectionFailed)


async def test_replies_that_are_none() -> None:
    for body in (b"", b"[]", b"{", b"{}", b'{"id": 1}'):
        for got in await Line((200, body)).both(lambda c: c.sessions.get("x")):
            assert isinstance(got, BadReply), body


async def test_an_address_of_another_kind() -> None:
    line = Line(httpx.UnsupportedProtocol("ftp"))
    for got in await line.both(lambda client: client.sessions.get("x")):
        assert type(got) is ClientError
