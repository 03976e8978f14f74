"""Message threads: a request that sends its new messages only, and names the reply that they follow.

The id of every message names the session and the turn it ended, so that any of them can be gone on from
while its session's messages are kept. Where they are not, the client hears the code that makes it send
its whole history again. A thread that was gone on from before branches, as sessions do.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
from msgspec.structs import replace as changed

from agentserve.server.errors import ApiError
from agentserve.server.http.anthropic.asked import Asked
from agentserve.server.http.anthropic.schemas import Thread
from agentserve.server.http.context import ServerContext
from agentserve.server.http.schemas import ToolDef
from agentserve.server.sessions.session_record import Lease
from agentserve.server.sessions.transcript import read_messages
from agentserve.types import SessionId

_PREFIX = "msg"


class _Settings(msgspec.Struct):
    """What a thread keeps of the request that created it, besides its messages."""

    tools: list[ToolDef] | None = None


def message_id(lease: Lease) -> str:
    return f"{_PREFIX}_{lease.turn}_{lease.key}"


async def continued(context: ServerContext, tenant: str, ours: Asked, thread: Thread | None) -> Asked:
    """The request with what its thread has: earlier messages, the system's among them, and the tools."""
    if thread is None or thread.type == "create":
        return ours
    if thread.type != "continue":
        raise ApiError(
            f"thread.type: {thread.type[:40]!r} is not one of create, continue", param="thread.type"
        )
    key, turn = _parts(thread.previous_message_id or "")
    session = context.directory.find(key)
    if session is None or session.tenant != tenant or context.expired(session):
        raise _not_found(thread)
    kept = context.chronicle.transcripts.get(key)
    count = kept.at(turn) if kept is not None else None
    if kept is None or count is None:
        raise _not_found(thread)
    messages = (await context.off_loop(read_messages, kept.messages))[:count]
    settings = msgspec.json.decode(kept.settings, type=_Settings)
    chat = changed(
        ours.chat,
        messages=messages + ours.chat.messages,
        tools=settings.tools,
        vllm_xargs={
            "session_id": session.public_id
        },  # who names a session, in the body or a header, says more
    )
    return replace(ours, chat=chat, places=("thread",) * count + ours.places, tools=())


def _parts(name: str) -> tuple[SessionId, int]:
    """Whose turn a message ended; what is no id of ours names no session."""
    prefix, _, rest = name.partition("_")
    turn, _, key = rest.partition("_")
    if prefix != _PREFIX or not (turn.isascii() and turn.isdecimal() and len(turn) < 19):
        return SessionId(""), 0
    return SessionId(key), int(turn)


def _not_found(thread: Thread) -> ApiError:
    return ApiError(
        f"thread.previous_message_id: {(thread.previous_message_id or '')[:80]!r} is not kept here; "
        "send the whole history.",
        status=404,
        param="thread.previous_message_id",
        code="thread_not_found",
        details={"error_code": "thread_not_found"},
    )
