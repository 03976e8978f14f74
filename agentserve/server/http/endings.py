"""Requests that the server ends: which run for whose key, and what the last word to each is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.types import Scope

from agentserve.server.errors import ApiError, shutting_down

_ENDED = "ended"  # in a request's state


def why_ended(scope: Scope) -> ApiError:
    """Of a request whose task was cancelled."""
    found = scope.get("state", {}).get(_ENDED)
    return found if isinstance(found, ApiError) else shutting_down()


@dataclass(eq=False, slots=True)
class _Open:
    task: asyncio.Task[object]
    scope: Scope


@dataclass(slots=True)
class OpenRequests:
    """Those that were let in and are not over, by the ids of their keys."""

    _of: dict[str, set[_Open]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    @contextmanager
    def held(self, key: str | None, scope: Scope) -> Iterator[None]:
        """While this request, of the running task, is answered. Where it was cut off, the cancellation ends
        here."""
        task = asyncio.current_task()
        if key is None or task is None:
            yield
            return
        mine = _Open(task, scope)
        self._of.setdefault(key, set()).add(mine)
        try:
            yield
        finally:
            rest = self._of[key]
            rest.discard(mine)
            if not rest:
                del self._of[key]
            if _ENDED in scope["state"]:
                task.uncancel()

    def cut(self, holds: Callable[[str], bool]) -> int:
        """End what runs for keys that no longer hold: how many these are. Who revokes its own key still
        gets the answer."""
        mine = asyncio.current_task()
        gone = [key for key in self._of if not holds(key)]
        cut = 0
        for one in [one for key in gone for one in self._of[key]]:
            if one.task is not mine and _ENDED not in one.scope["state"]:
                one.scope["state"][_ENDED] = key_revoked()
                one.task.cancel()
                cut += 1
        return cut


def key_revoked() -> ApiError:
    return ApiError("The key of this request is let in no longer.", status=401, code="key_revoked")
