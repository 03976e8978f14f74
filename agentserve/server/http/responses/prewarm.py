"""`prewarm`: compute a prompt now, so that the turn that is asked for later finds it. Nothing is said, no
session changes, and what a session's tools are still running for is not touched."""

from __future__ import annotations

from agentserve.server.http import history, sampling
from agentserve.server.http.chat_request import render, template_of
from agentserve.server.http.context import ServerContext
from agentserve.server.http.responses.job import Job
from agentserve.server.http.schemas import ChatRequest
from agentserve.server.http.structure import Form, chat_form
from agentserve.server.http.turn_parts import answer_factory, namespace
from agentserve.server.sessions.identity import DEFAULT_TENANT, new_session_id
from agentserve.server.sessions.seats import OneShotSeat, chain_keys
from agentserve.server.sessions.session_record import Session, common
from agentserve.server.sessions.turns import TurnSpec
from agentserve.text.unfinished import call_ids
from agentserve.types import SessionId


async def prewarm_job(context: ServerContext, fields: ChatRequest) -> Job:
    """A turn of nobody's on the prompt that the request would have, beside its session's KV. ApiError as
    the request itself would get it."""
    limits = context.options.limits
    context.check_model(fields.model)
    sampling.check_fields(fields, context.facts, limits)
    was_cut = context.directory.cut
    cut = {id_ for raw in fields.messages for id_ in call_ids(raw) if was_cut(DEFAULT_TENANT, id_)}
    messages = await context.off_loop(history.message_dicts, fields.messages, limits, cut)
    tools = history.tool_dicts(fields.tools, limits)
    template = template_of(context)
    await context.grammars.define(chat_form(fields, tools, limits))  # it, too, is there then
    keys = await context.off_loop(chain_keys, context.chain, messages, fields.cache_salt)
    session = None
    if fields.session_id is not None:
        session = context.directory.get(DEFAULT_TENANT, fields.session_id)
    shared = common(session.chain, keys) if session is not None else 0
    spliced = {i: ids for i, ids in session.replies.items() if i < shared} if session is not None else {}
    prompt = await context.off_loop(render, template, fields, messages, tools, spliced)
    settings = sampling.build(
        fields, context.facts, limits, prompt=len(prompt), max_tokens=1, seed=0, logprobs=None
    )
    seat = OneShotSeat(SessionId(new_session_id()), context.engine)
    if session is not None and context.directory.find(session.key) is not None:
        length = _computed(session, shared)
        if length:  # the same worker has the KV
            context.engine.fork(session.key, seat.key, length)
    spec = TurnSpec(
        seat=seat,
        prompt=prompt,
        sampling=settings,
        answer=answer_factory(context, settings, form=Form(), continues=False),
        namespace=namespace(DEFAULT_TENANT, fields.cache_salt),
        priority=fields.priority or 0,
    )
    return Job((spec,), prompt, None, None, lambda: seat.rollback("not started"))


def _computed(session: Session, messages: int) -> int:
    """Tokens up to the last of the first messages with which a turn ended."""
    ends = (session.points[key] for key in reversed(session.chain[:messages]) if key in session.points)
    return next(ends, 0)
