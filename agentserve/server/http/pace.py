"""A deadline for bodies: who sends one byte now and then keeps a connection and a task for nothing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.types import Message, Receive, Scope

from agentserve.server.errors import ApiError

_PACE = "pace"  # in the scope's state


@dataclass(slots=True)
class Pace:
    """What is known of one request's body. It is kept in the scope apart from who receives for that scope:
    together they would be a cycle, and every request something for the garbage collector to find."""

    until: float | None = None  # of the loop's clock; None: the body was not asked for yet
    limited: bool = True


class Paced:
    """The `receive` of one request: raises a 408 where its body is not whole in time."""

    def __init__(self, receive: Receive, seconds: float, pace: Pace) -> None:
        self._receive = receive
        self._seconds = seconds
        self._pace = pace

    async def __call__(self) -> Message:
        pace = self._pace
        if not pace.limited:
            return await self._receive()
        if pace.until is None:
            pace.until = asyncio.get_running_loop().time() + self._seconds
        try:
            async with asyncio.timeout_at(pace.until):
                message = await self._receive()
        except TimeoutError:
            raise _too_slow(self._seconds) from None
        if not message.get("more_body"):
            pace.limited = False  # what is still to come is the client's leaving
        return message


def paced(scope: Scope, receive: Receive, seconds: float) -> Paced:
    pace = scope["state"][_PACE] = Pace()
    return Paced(receive, seconds, pace)


def let_body_take_its_time(scope: Scope) -> None:
    """This request's body is made while it is sent."""
    found = scope["state"].get(_PACE)
    if isinstance(found, Pace):
        found.limited = False


def _too_slow(seconds: float) -> ApiError:
    return ApiError(
        f"The request body was not whole within {seconds:g} s.",
        status=408,
        code="request_timeout",
        headers={"connection": "close"},
    )
