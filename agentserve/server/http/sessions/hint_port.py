"""What this side needs of the room that knows what hints mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from tiering.policy.base import Hints


class Receipt(Protocol):
    """What became of one field."""

    @property
    def status(self) -> str:
        """accepted | clipped | deferred | rejected"""
        ...

    @property
    def value(self) -> object:
        """As it is used now; None where it is not."""
        ...

    @property
    def reason(self) -> str: ...


ReadHints = Callable[[Mapping[str, object], float], tuple[Hints, Mapping[str, Receipt]]]
"""(what the client sent, monotonic seconds now) -> what holds now, and a receipt per field. Never raises."""
