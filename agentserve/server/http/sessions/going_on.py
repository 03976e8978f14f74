"""The turn that follows when a session's tool calls have their results: from its own transcript."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from agentserve.server.errors import json_response
from agentserve.server.http.chat import chat_reply
from agentserve.server.http.chat_request import ChatJob, prepare_turns
from agentserve.server.http.context import ServerContext
from agentserve.server.http.names import SESSION_HEADER
from agentserve.server.http.sampling import integer
from agentserve.server.http.schemas import ChatRequest, StreamOptions
from agentserve.server.http.sessions.taking import turn_running, went_on
from agentserve.server.http.sse import unless_gone
from agentserve.server.http.streaming import open_stream
from agentserve.server.limits import INT64_MAX
from agentserve.server.sessions.session_record import Claim, Lease, Session
from agentserve.server.sessions.transcript import Held, Transcript, read_messages
from agentserve.server.text_port import JsonObject


class TurnOptions(msgspec.Struct, kw_only=True):
    """What a request may say of the turn it begins; the rest is as in the session's last request."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None

    def check(self) -> None:
        """Before anything is taken: the turn that these are for may begin much later."""
        integer("max_tokens", self.max_tokens, 1, 1, INT64_MAX)


async def next_turn(
    context: ServerContext, session: Session, kept: Transcript, options: TurnOptions
) -> tuple[ChatRequest, ChatJob]:
    """The session's next turn, leased, on its messages and the results that are held.

    An id is exclusive here: where another turn came first this one is a 409.
    """
    held = {call: kept.held[call] for call in session.pending}
    fields = await context.off_loop(next_request, kept, held, options)

    def begin(claim: Claim) -> Lease:
        lease = context.directory.extend(session, claim.keys, context.clock.now())
        if lease is not None:
            return lease
        raise turn_running(session) if session.running is not None else went_on(session)

    return fields, await prepare_turns(context, session.tenant, fields, begin)


def next_request(kept: Transcript, held: Mapping[str, Held], options: TurnOptions) -> ChatRequest:
    """The chat request that a client would send now. `held` is in call order."""
    body: JsonObject = msgspec.json.decode(kept.settings)
    body["messages"] = read_messages(kept.messages) + [
        {"role": "tool", "tool_call_id": call, "content": msgspec.json.decode(result.content)}
        for call, result in held.items()
    ]
    if body.get("tool_choice") not in (None, "none"):
        body["tool_choice"] = "auto"  # a choice that forces a call would force one after the other
    if options.max_tokens is not None:
        body.pop("max_completion_tokens", None)
        body["max_tokens"] = options.max_tokens
    fields = msgspec.convert(body, ChatRequest, str_keys=True)
    return msgspec.structs.replace(fields, stream=options.stream, stream_options=options.stream_options)


async def respond(context: ServerContext, request: Request, fields: ChatRequest, job: ChatJob) -> Response:
    """Run the turn to its end, whether or not the client stays, and answer as chat completions do."""
    headers = {SESSION_HEADER: job.session_id}
    reply = chat_reply(context, fields, job)
    if fields.stream:
        frames = context.background.frames(reply.stream(), job.rollback)
        return await open_stream(context, request, frames, headers)  # the turn's end is its task's affair
    whole = context.background.whole(reply.whole(), job.rollback)
    return json_response(await unless_gone(request.receive, whole), headers=headers)
