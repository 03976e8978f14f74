"""What `cache_control` says of a session's KV: how long its client means to come back for it.

All KV is kept for as long as there is room, so "5m" says nothing new. "1h" raises the session's
priority by one, unless its client has given it one itself, until a request comes without it.
"""

from __future__ import annotations

from collections.abc import Iterator

from agentserve.server.http.anthropic.schemas import CacheControl, PromptFields
from agentserve.server.http.context import ServerContext
from agentserve.server.http.said import heed
from agentserve.server.sessions.session_record import Session

LONG = "1h"


def take_retention(context: ServerContext, session: Session, fields: PromptFields) -> None:
    """Keep it as a hint, for the end of the turn that is about to run."""
    said = session.said
    if any(mark is not None and mark.ttl == LONG for mark in _marks(fields)):
        if not said.priority:
            heed(context, session, {"priority": 1}, lent=True)
    elif said.lent:
        heed(context, session, {"priority": None})


def _marks(fields: PromptFields) -> Iterator[CacheControl | None]:
    yield fields.cache_control
    yield from (tool.cache_control for tool in fields.tools or ())
    contents = [fields.system or "", *(turn.content for turn in fields.messages)]
    yield from (
        block.cache_control for content in contents if not isinstance(content, str) for block in content
    )
