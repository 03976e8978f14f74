"""Requests that come twice: a client that sends an Idempotency-Key gets its first answer again.

SDKs send a request again when its answer was lost on the way; without a key such a turn runs beside the
first. Kept in memory and bounded: an answer that is no longer here is computed once more. A run that goes
on without its reader is shared: whoever repeats its request reads it from the start.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from hashlib import sha256

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentserve.server.errors import ApiError
from agentserve.server.holdings import Holdings
from agentserve.server.http.callers import caller_in
from agentserve.server.http.sse import DONE, ClientGone
from agentserve.server.http.voice import error_response
from agentserve.server.tenants.keys import ANYBODY

HEADER = "idempotency-key"
REPLAYED = (b"idempotent-replayed", b"true")
MOST_CHARS = 256  # of a key
_ENDS = (DONE, b'data: {"type":"message_stop"}\n\n')  # of streams that tell of no error
_FAILED = b"event: response.failed\n"  # of a stream that ends as others do
_KEPT_HEADERS = frozenset({b"content-type", b"x-session-id", b"x-turn-id", b"cache-control"})
_STATE = "shared_run"  # of a request's state: what a route calls that shares its run

Key = tuple[
    str, str, str | None, str | None
]  # path, key, and whose it is: a tenant's, or an admin's API key's
Answer = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class KeptReply:
    """A whole answer that was no error."""

    request: bytes  # digest of the body it answers
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    at: float

    @property
    def size(self) -> int:
        return len(self.body)

    def running(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Shared:
    """A run that every request with its key is a reader of."""

    request: bytes
    answer: Answer
    running: Callable[[], bool]
    at: float  # when it was last known to run
    size: int = 256


def share(request: Request, answer: Answer, running: Callable[[], bool]) -> None:
    """The run that this request has begun does not end with its connection: a request that repeats it gets
    `answer`, while it is `running` and as long afterwards as any answer is kept."""
    shared = request.scope.get("state", {}).get(_STATE)
    if shared is not None:
        shared(answer, running)


@dataclass(frozen=True, slots=True)
class KeptBounds:
    seconds: float = 600.0  # that an answer is kept: SDKs give up long before
    answers: int = 4096
    bytes: int = 64 << 20  # of all answers
    answer_bytes: int = 1 << 20  # of one; a longer one is not kept


class Replies:
    """Answers by key, and the keys whose first request still runs. Of too many the oldest go, of the tenant
    that has most: with its answer another one's retry would lose that it acts once."""

    def __init__(self, bounds: KeptBounds = KeptBounds()) -> None:
        self.bounds = bounds
        self.running: set[Key] = set()
        self._kept: OrderedDict[Key, KeptReply | Shared] = OrderedDict()
        self._held: Holdings[Key] = Holdings(bounds.answers, bounds.bytes)

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Key, now: float) -> KeptReply | Shared | None:
        while self._kept and now - next(iter(self._kept.values())).at >= self.bounds.seconds:
            oldest, reply = self._kept.popitem(last=False)
            self._held.drop(_owner(oldest), oldest)
            if isinstance(reply, Shared) and reply.running():
                self.keep(oldest, replace(reply, at=now))
        return self._kept.get(key)

    def keep(self, key: Key, reply: KeptReply | Shared) -> None:
        self._kept[key] = reply
        self._kept.move_to_end(key)
        self._held.put(_owner(key), key, reply.size)
        # Runs that still run stay: their number is bounded elsewhere.
        while (out := self._held.next_out(lambda name: not self._kept[name].running())) is not None:
            self._held.drop(_owner(out), out)
            del self._kept[out]


def _owner(key: Key) -> str:
    return key[2] or ""


class Idempotency:
    """Plain ASGI middleware for POSTs of the dialects. The session routes have rules of their own, by call
    id and epoch, which hold across restarts."""

    def __init__(self, app: ASGIApp, clock: Callable[[], float], replies: Replies | None = None) -> None:
        self._app = app
        self._now = clock
        self.replies = Replies() if replies is None else replies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(HEADER)
        if given is None:
            await self._app(scope, receive, send)
            return
        if not 1 <= len(given) <= MOST_CHARS:
            refusal = ApiError(f"Idempotency-Key: 1 to {MOST_CHARS} characters", param="Idempotency-Key")
            await error_response(refusal, scope)(scope, receive, send)
            return
        caller = caller_in(scope) or ANYBODY
        # A tenant's, by whichever of its keys: one may take another's place between two tries.
        key = (scope["path"], given, caller.tenant, caller.key if caller.tenant is None else None)
        kept = self.replies.get(key, self._now())
        if kept is not None:
            await self._again(kept, scope, receive, send)
        elif key in self.replies.running:
            await error_response(_running(), scope)(scope, receive, send)
        else:
            await self._first(key, scope, receive, send)

    async def _first(self, key: Key, scope: Scope, receive: Receive, send: Send) -> None:
        recorder = _Recorder(self.replies.bounds.answer_bytes, receive, send)
        self.replies.running.add(key)

        def shared(answer: Answer, running: Callable[[], bool]) -> None:
            self.replies.keep(key, Shared(recorder.digest(), answer, running, self._now()))
            self.replies.running.discard(key)

        scope.setdefault("state", {})[_STATE] = shared
        try:
            await self._app(scope, recorder.receive, recorder.send)
        finally:
            self.replies.running.discard(key)
            reply = recorder.reply(self._now())
            if reply is not None:
                self.replies.keep(key, reply)

    async def _again(self, kept: KeptReply | Shared, scope: Scope, receive: Receive, send: Send) -> None:
        digest = sha256()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            digest.update(message.get("body", b""))
            if not message.get("more_body"):
                break
        if digest.digest() != kept.request:
            await error_response(_reused(), scope)(scope, receive, send)
        elif isinstance(kept, Shared):
            await self._read_along(kept, scope, receive, send)
        else:
            await self._repeat(kept, send)

    @staticmethod
    async def _read_along(kept: Shared, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await kept.answer(Request(scope, receive))
        except ClientGone:
            return
        except ApiError as error:
            response = error_response(error, scope)
        name, value = REPLAYED
        MutableHeaders(raw=response.raw_headers)[name.decode()] = value.decode()
        await response(scope, receive, send)

    @staticmethod
    async def _repeat(kept: KeptReply, send: Send) -> None:
        headers = [*kept.headers, REPLAYED]
        if not any(name == b"content-type" and value.startswith(b"text/event") for name, value in headers):
            headers.append((b"content-length", str(len(kept.body)).encode()))
        await send({"type": "http.response.start", "status": kept.status, "headers": headers})
        await send({"type": "http.response.body", "body": kept.body, "more_body": False})


class _Recorder:
    """One exchange as it passes."""

    def __init__(self, most: int, receive: Receive, send: Send) -> None:
        self._most = most
        self._receive = receive
        self._send = send
        self._digest = sha256()
        self._status = 0
        self._headers: tuple[tuple[bytes, bytes], ...] = ()
        self._parts: list[bytes] = []
        self._size = 0
        self._whole = False

    def digest(self) -> bytes:
        """Of the body, as far as it was read."""
        return self._digest.digest()

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._digest.update(message.get("body", b""))
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = tuple(
                (name, value) for name, value in message["headers"] if name.lower() in _KEPT_HEADERS
            )
        elif message["type"] == "http.response.body":
            body = message.get("body", b"")
            self._size += len(body)
            if self._size <= self._most:
                self._parts.append(body)
            else:
                self._parts.clear()
            self._whole = not message.get("more_body", False)
        await self._send(message)

    def reply(self, now: float) -> KeptReply | None:
        """What to say again; None for errors, and for what was cut or is too long."""
        if not self._whole or self._status not in (200, 202) or self._size > self._most:
            return None
        body = b"".join(self._parts)
        streamed = any(value.startswith(b"text/event-stream") for _, value in self._headers)
        if streamed and (_FAILED in body or not body.endswith(_ENDS)):
            return None
        return KeptReply(self.digest(), self._status, self._headers, body, now)


def _running() -> ApiError:
    return ApiError(
        "The first request with this Idempotency-Key is still running.",
        status=409,
        param="Idempotency-Key",
        code="idempotent_request_running",
        headers={"retry-after": "1", "x-should-retry": "true"},
    )


def _reused() -> ApiError:
    return ApiError(
        "This Idempotency-Key came with another request before.",
        status=422,
        param="Idempotency-Key",
        code="idempotency_key_reused",
    )
