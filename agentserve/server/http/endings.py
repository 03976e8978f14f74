"""Requests that the server ends: which run for whose key, and what the last word to each is.

To what answers it, a request that is cut off looks like one whose client has left: that is thought of
everywhere. Only the last word is another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.types import Message, Receive, Scope

from agentserve.server.errors import ApiError
from agentserve.server.http.callers import ASKS

_ENDED = "ended"  # in a request's state


def ended(scope: Scope) -> ApiError | None:
    """Why the server has ended this request, if it has."""
    found = scope.get("state", {}).get(_ENDED)
    return found if isinstance(found, ApiError) else None


class Cuttable:
    """The `receive` of one request, which may be cut off."""

    def __init__(self, receive: Receive, scope: Scope) -> None:
        self._receive = receive
        self._scope = scope
        self._cut = asyncio.Event()

    def cut(self, why: ApiError) -> None:
        self._scope["state"][_ENDED] = why
        self._cut.set()

    async def __call__(self) -> Message:
        message = asyncio.ensure_future(self._receive())
        cut = asyncio.ensure_future(self._cut.wait())
        try:
            await asyncio.wait({message, cut}, return_when=asyncio.FIRST_COMPLETED)
            return message.result() if message.done() and not cut.done() else {"type": "http.disconnect"}
        finally:
            for task in (message, cut):
                task.cancel()
            await asyncio.gather(message, cut, return_exceptions=True)


@dataclass(slots=True)
class OpenRequests:
    """Those that were let in and are not over, by the ids of their keys."""

    _of: dict[str, set[Cuttable]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    @contextmanager
    def held(self, key: str | None, receive: Receive, scope: Scope) -> Iterator[Receive]:
        """While this request is answered: its `receive`."""
        if key is None:
            yield receive
            return
        mine = Cuttable(receive, scope)
        self._of.setdefault(key, set()).add(mine)
        try:
            yield mine
        finally:
            rest = self._of[key]
            rest.discard(mine)
            if not rest:
                del self._of[key]

    def cut(self, holds: Callable[[str], bool]) -> int:
        """End what runs for keys that no longer hold: how many these are."""
        gone = [one for key, all_ in self._of.items() if not holds(key) for one in all_]
        for one in gone:
            one.cut(_revoked())
        return len(gone)


def _revoked() -> ApiError:
    return ApiError(
        "The key of this request is let in no longer.", status=401, code="key_revoked", headers=ASKS
    )
