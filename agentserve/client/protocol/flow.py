"""The protocol as generators: what to do next goes out, what came of it goes in.

Nothing here reads a clock, opens a socket or draws a random number. A shell runs a flow: it sends what is
yielded, sleeps where it is told to, and hands back what came.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from agentserve.client.protocol.errors import BadReply, ClientError, ConnectionFailed, status_error

JsonObject = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    body: JsonObject | None = None
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = True  # sending it twice is the same as sending it once


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes

    def json(self) -> JsonObject:
        """BadReply."""
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError):
            raise BadReply(f"no JSON in a reply of status {self.status}: {self.body[:80]!r}") from None
        if not isinstance(value, dict):
            raise BadReply(f"no object in a reply of status {self.status}: {self.body[:80]!r}")
        return value


@dataclass(frozen=True, slots=True)
class Broken:
    """No reply came, or a stream was cut off."""

    told: str
    sent: bool = True  # the server may have had the request


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


Flow = Generator[Request | Pause, Reply | Broken | None, T]


@dataclass(frozen=True, slots=True)
class Retry:
    """How long to go on trying, in seconds. What is slept between tries adds up to `patience` at most."""

    first: float = 0.25
    longest: float = 8.0
    patience: float = 120.0  # a server that is started again reads its weights

    def __post_init__(self) -> None:
        if not (self.first > 0 and self.longest >= self.first and self.patience >= 0):
            raise ValueError("Retry: needs 0 < first <= longest and patience >= 0")


@dataclass(slots=True)
class Delays:
    """The pauses of one thing that is tried again: they double, and half of each is drawn."""

    retry: Retry
    draw: Callable[[], float]  # in [0, 1)
    _tries: int = 0
    _spent: float = 0.0

    def next(self, at_least: float = 0.0) -> float | None:
        """None: enough."""
        whole = min(self.retry.longest, self.retry.first * float(1 << min(self._tries, 30)))
        delay = max(at_least, whole * (0.5 + 0.5 * self.draw()))
        if self._spent + delay > self.retry.patience:
            return None
        self._tries += 1
        self._spent += delay
        return delay

    def progress(self) -> None:
        """It worked: what fails next is another matter."""
        self._tries, self._spent = 0, 0.0


@dataclass(frozen=True, slots=True)
class Means:
    """What flows are given from outside."""

    retry: Retry
    draw: Callable[[], float]
    new_key: Callable[[], str]  # for `Idempotency-Key`

    def delays(self) -> Delays:
        return Delays(self.retry, self.draw)

    def once(self) -> Means:
        """For what is to be tried once."""
        return replace(self, retry=replace(self.retry, patience=0.0))


def asked(request: Request, means: Means, *, done: int | None = None) -> Flow[Reply]:
    """The reply to a request, which is sent again where that may help and can do no harm. ClientError.

    `done`: a status that says, after a try whose answer was lost, that this try had done it.
    """
    delays = means.delays()
    lost = False
    while True:
        got = yield request
        assert got is not None
        if isinstance(got, Reply) and (got.status < 300 or (lost and got.status == done)):
            return got
        lost = lost or isinstance(got, Broken) or got.status >= 500
        wait = again_after(request, got)
        delay = None if wait is None else delays.next(wait)
        if delay is None:
            raise error_of(got)
        yield Pause(delay)


def again_after(request: Request, got: Reply | Broken) -> float | None:
    """Seconds until a request may be sent again, at the least; None: not again."""
    if isinstance(got, Broken):
        return 0.0 if request.repeatable or not got.sent else None
    word = got.headers.get("x-should-retry")
    if word == "false":
        return None
    known = got.status in (408, 429) or got.status >= 500 or word == "true"
    refused = got.status == 429  # nothing was done for it
    if not known or not (request.repeatable or refused):
        return None
    try:
        return max(0.0, float(got.headers.get("retry-after", "0")))
    except ValueError:
        return 0.0  # a date: the usual pauses will do


def error_of(got: Reply | Broken) -> ClientError:
    if isinstance(got, Broken):
        return ConnectionFailed(got.told)
    try:
        error = got.json().get("error")
    except BadReply:
        error = None
    if not isinstance(error, dict):
        return status_error(got.status, got.body[:200].decode("utf-8", "replace") or "no reason given", None)
    code = error.get("code")
    message = str(error.get("message") or "no reason given")
    return status_error(got.status, message, None if code is None else str(code), error)
