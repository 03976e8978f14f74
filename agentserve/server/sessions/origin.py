"""The request that turns are run for: when it came, and whether it has had a turn.

Whatever task a request begins finds it here by itself (`asyncio` hands a context down): a dialect has nothing
to pass on. Turns that the server begins on its own have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any


class Origin:
    """One request of a client."""

    def __init__(self, state: Mapping[str, Any], now: Callable[[], float]) -> None:
        """state: what is known of the request by now; more may come."""
        self._state = state
        self._now = now
        self.arrived = now()
        self._whole = False
        self.begun = False  # a turn was asked for
        self.refusal = ""  # the code of the error that it was answered with

    @property
    def request(self) -> str:
        return str(self._state.get("request_id", ""))

    @property
    def route(self) -> str:
        """As it was declared; empty: none was found for it."""
        return str(self._state.get("route", ""))

    def whole(self) -> None:
        """Its body is there."""
        if not self._whole:
            self._whole = True
            self.arrived = self._now()

    def begin(self) -> float:
        """It asks for a turn: when that arrived. Turns after its first follow from what became of that."""
        if self.begun:
            return self._now()
        self.begun = True
        return self.arrived


_asked: ContextVar[Origin | None] = ContextVar("asked", default=None)


def asked_by() -> Origin | None:
    return _asked.get()


@contextmanager
def asking(origin: Origin) -> Iterator[None]:
    """While this request is answered, and in every task that is begun meanwhile."""
    token = _asked.set(origin)
    try:
        yield
    finally:
        _asked.reset(token)
