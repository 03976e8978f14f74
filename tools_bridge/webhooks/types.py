"""What is delivered, to whom, and what came of it. Values only.

Moments are Unix time in seconds: they are kept on disk and outlive the machine's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

import msgspec

from tools_bridge.webhooks.signing import Secret, hint


class WebhookError(Exception):
    """The message is one line, and may be shown to a client."""


class UnknownEndpoint(WebhookError):
    pass


class UnknownDelivery(WebhookError):
    pass


class EndpointDisabled(WebhookError):
    pass


class OutboxFull(WebhookError):
    """A bound is reached: it may be tried again later."""


class EventTooLarge(WebhookError):
    pass


class Conflict(WebhookError):
    """Another body under an id that was used, or a replay of what has not ended."""


class NotKept(WebhookError):
    """The disk did not take it: nothing was accepted."""


class Kind(StrEnum):
    TOOL = "tool"  # somebody waits for its outcome, until a deadline
    LIFECYCLE = "lifecycle"  # an event; nobody waits


class Why(StrEnum):
    """Why a delivery was given up."""

    DEADLINE = "deadline"  # there was no time left for another attempt
    EXHAUSTED = "exhausted"  # the schedule has no more attempts
    CIRCUIT_OPEN = "circuit_open"  # the endpoint keeps failing, and is not tried again before the deadline
    ADDRESS_REFUSED = "address_refused"
    BAD_REPLY = "bad_reply"  # a success, whose body is no tool result
    ENDPOINT_DISABLED = "endpoint_disabled"
    ENDPOINT_DELETED = "endpoint_deleted"
    WITHDRAWN = "withdrawn"  # by whoever sent it


class ToolResult(msgspec.Struct, frozen=True):
    """What a receiver answered at once. `output`: text, or content parts as the receiver wrote them."""

    success: bool
    output: str | list[dict[str, object]]
    error: str = ""


class Delivered(msgspec.Struct, frozen=True, tag="delivered"):
    """`result` None: the receiver has it, and may post the result later."""

    result: ToolResult | None = None


class GaveUp(msgspec.Struct, frozen=True, tag="gave_up"):
    why: Why
    detail: str = ""


Ending = Delivered | GaveUp


class Key(NamedTuple):
    """A delivery's name: one event goes to an endpoint once."""

    endpoint: str
    event: str  # its `webhook-id`, the same in every attempt


class Endpoint(msgspec.Struct, frozen=True):
    id: str
    owner: str  # whose it is; a label that means nothing here
    name: str
    url: str
    event_types: tuple[str, ...]
    secrets: tuple[Secret, ...]  # the newest first
    created: float
    updated: float
    disabled: str = ""  # why; empty: it is not
    form: str = ""  # of its events, as its owner wants them; a label that means nothing here

    @property
    def secret_hint(self) -> str:
        """What may be shown of the secret that signs."""
        return hint(self.secrets[0].text)


class Attempt(msgspec.Struct, frozen=True):
    """One attempt, for the delivery log. What the receiver wrote is in none of it."""

    at: float
    seconds: float
    status: int | None = None
    error: str = ""


class State(StrEnum):
    PENDING = "pending"
    ENDED = "ended"  # and whoever waits for it has not said that it knows
    LOGGED = "logged"


class Delivery(msgspec.Struct, frozen=True):
    """`attempts`: the last ones. `tries`: how many there were since it began, or was begun again."""

    endpoint: str
    event: str
    type: str
    kind: Kind
    created: float
    began: float
    next_at: float
    size: int  # bytes of the body
    deadline: float | None = None
    owner: str = ""  # the endpoint's
    state: State = State.PENDING
    tries: int = 0
    attempts: tuple[Attempt, ...] = ()
    ending: Ending | None = None
    ended: float = 0.0
    replays: int = 0

    @property
    def key(self) -> Key:
        return Key(self.endpoint, self.event)

    @property
    def waited_for(self) -> bool:
        """Its outcome is somebody's. A replay's is nobody's: the call it was about is over."""
        return self.kind is Kind.TOOL and self.replays == 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a tool call's delivery. It is told again after a restart until it was acknowledged, and counts as
    owed until then: also one that means nothing to who hears it is to be acknowledged."""

    key: Key
    ending: Ending


@dataclass(frozen=True, slots=True)
class Disabled:
    """An endpoint that the receiver or an operator took out of use."""

    endpoint: str
    why: str


Told = Outcome | Disabled


class Time(Protocol):
    """The clock and the timer of whoever delivers."""

    def now(self) -> float:
        """Unix time that passes as time does: nobody sets it."""
        ...

    def unix(self) -> float:
        """Unix time as the machine has it now, for timestamps that receivers compare with theirs."""
        ...

    def later(self, seconds: float, call: Callable[[], None]) -> Callable[[], None]:
        """`call` on the event loop, once. Returns what takes it back."""
        ...
