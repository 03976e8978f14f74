"""How long the prompt of a request would be, without running it: nothing is leased or changed."""

from __future__ import annotations

from starlette.requests import Request

from agentserve.server.http import history
from agentserve.server.http.chat_request import render, template_of
from agentserve.server.http.context import ServerContext
from agentserve.server.http.names import session_name
from agentserve.server.http.schemas import ChatRequest
from agentserve.server.sessions.identity import DEFAULT_TENANT
from agentserve.server.sessions.seats import chain_keys
from agentserve.server.sessions.session_record import Claim
from agentserve.text.unfinished import call_ids


async def prompt_tokens(context: ServerContext, request: Request, fields: ChatRequest) -> int:
    """As `chat_request.prepare` makes it: with the ids that the request's session generated, which need
    not be those that its text would be encoded to."""
    limits = context.options.limits
    context.check_model(fields.model)
    named = session_name(request, fields.session_id, limits)
    cut = {
        id_ for raw in fields.messages for id_ in call_ids(raw) if context.directory.cut(DEFAULT_TENANT, id_)
    }
    messages = await context.off_loop(history.message_dicts, fields.messages, limits, cut)
    tools = history.tool_dicts(fields.tools, limits)
    keyed = messages
    if cut:
        keyed = await context.off_loop(history.message_dicts, fields.messages, limits, cut, shown=False)
    keys = await context.off_loop(chain_keys, context.chain, keyed, fields.cache_salt)
    answers, calls = history.trailing_call_ids(messages), history.call_ids(messages)
    replies = context.directory.replies(Claim(DEFAULT_TENANT, named, answers, keys, calls))
    prompt = await context.off_loop(render, template_of(context), fields, messages, tools, replies)
    return len(prompt)
