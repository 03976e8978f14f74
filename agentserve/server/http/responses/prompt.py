"""The prompt that a turn would have, without running it: nothing is leased or changed."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from agentserve.server.http import history
from agentserve.server.http.chat_request import render, template_of
from agentserve.server.http.context import ServerContext
from agentserve.server.http.schemas import ChatRequest
from agentserve.server.http.structure import Form, chat_form
from agentserve.server.sessions.identity import DEFAULT_TENANT
from agentserve.server.sessions.seats import chain_keys
from agentserve.server.sessions.session_record import Session, common
from agentserve.text.unfinished import call_ids
from agentserve.types import SessionId


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: array[int]
    form: Form
    session: SessionId | None = None  # the one that it goes on
    shared: int = 0  # tokens that session has of it


async def prompt_of(context: ServerContext, fields: ChatRequest) -> Prompt:
    """With the ids that the session it names has generated. ApiError as the turn itself would get it."""
    limits = context.options.limits
    context.check_model(fields.model)
    was_cut = context.directory.cut
    cut = {id_ for raw in fields.messages for id_ in call_ids(raw) if was_cut(DEFAULT_TENANT, id_)}
    messages = await context.off_loop(history.message_dicts, fields.messages, limits, cut)
    tools = history.tool_dicts(fields.tools, limits)
    form = chat_form(fields, tools, limits)
    template = template_of(context)
    keyed = messages
    if cut:  # a history is the same with and without them
        keyed = await context.off_loop(history.message_dicts, fields.messages, limits, cut, shown=False)
    keys = await context.off_loop(chain_keys, context.chain, keyed, fields.cache_salt)
    session = None
    if fields.session_id is not None:
        session = context.directory.get(DEFAULT_TENANT, fields.session_id)
    if session is None:
        return Prompt(await context.off_loop(render, template, fields, messages, tools), form)
    same = common(session.chain, keys)
    spliced = {i: ids for i, ids in session.replies.items() if i < same}
    shared = _tokens(session, same)
    ids = await context.off_loop(render, template, fields, messages, tools, spliced)
    return Prompt(ids, form, session.key, shared)


def _tokens(session: Session, messages: int) -> int:
    """Up to the last of its first messages with which a turn ended."""
    ends = (session.points[key] for key in reversed(session.chain[:messages]) if key in session.points)
    return next(ends, 0)
