"""What a full collection has to look at: it stops every stream for as long as that takes."""

from __future__ import annotations

import gc

import msgspec

from agentserve.messages import Event, StepDone, Token
from agentserve.server.sessions.events import Event as SessionEvent
from agentserve.types import SessionId, TurnId


def test_what_is_kept_of_every_token_is_nothing_to_the_collector() -> None:
    """Sessions keep their streams, and who reads slowly has thousands of tokens waiting; none of it can be
    part of a cycle."""
    top = tuple((token, -float(token)) for token in range(20))
    step = StepDone([Token(SessionId("s"), TurnId(1), index, 5, -0.5, top) for index in range(50)])
    event = msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=Event)
    assert isinstance(event, StepDone)
    assert not any(gc.is_tracked(token) for token in event.events)
    assert not gc.is_tracked(SessionEvent(1, "delta", b'{"text": "a"}'))
