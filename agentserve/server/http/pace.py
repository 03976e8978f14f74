"""A deadline for bodies: who sends one byte now and then keeps a connection and a task for nothing."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive, Scope

from agentserve.server.errors import ApiError

_PACE = "pace"  # in the scope's state


class Paced:
    """The `receive` of one request: raises a 408 where its body is not whole in time."""

    def __init__(self, receive: Receive, seconds: float) -> None:
        self._receive = receive
        self._seconds = seconds
        self._until: float | None = None
        self.limited = True

    async def __call__(self) -> Message:
        if not self.limited:
            return await self._receive()
        if self._until is None:
            self._until = asyncio.get_running_loop().time() + self._seconds
        try:
            async with asyncio.timeout_at(self._until):
                message = await self._receive()
        except TimeoutError:
            raise _too_slow(self._seconds) from None
        if not message.get("more_body"):
            self.limited = False  # what is still to come is the client's leaving
        return message


def paced(scope: Scope, receive: Receive, seconds: float) -> Paced:
    found = scope["state"][_PACE] = Paced(receive, seconds)
    return found


def let_body_take_its_time(scope: Scope) -> None:
    """This request's body is made while it is sent."""
    found = scope["state"].get(_PACE)
    if isinstance(found, Paced):
        found.limited = False


def _too_slow(seconds: float) -> ApiError:
    return ApiError(
        f"The request body was not whole within {seconds:g} s.",
        status=408,
        code="request_timeout",
        headers={"connection": "close"},
    )
