"""`prewarm`: compute a prompt now, so that the turn that is asked for later finds it. Nothing is said, no
session changes, and what a session's tools are still running for is not touched."""

from __future__ import annotations

from agentserve.server.http import sampling
from agentserve.server.http.context import ServerContext
from agentserve.server.http.responses.job import Job
from agentserve.server.http.responses.prompt import prompt_of
from agentserve.server.http.schemas import ChatRequest
from agentserve.server.http.structure import Form
from agentserve.server.http.turn_parts import answer_factory, namespace
from agentserve.server.sessions.identity import DEFAULT_TENANT, new_session_id
from agentserve.server.sessions.seats import OneShotSeat
from agentserve.server.sessions.turns import TurnSpec
from agentserve.types import SessionId


async def prewarm_job(context: ServerContext, fields: ChatRequest) -> Job:
    """A turn of nobody's on the prompt that the request would have, beside its session's KV. ApiError as
    the request itself would get it."""
    limits = context.options.limits
    sampling.check_fields(fields, context.facts, limits)
    prompt = await prompt_of(context, fields)
    await context.grammars.define(prompt.form)  # it, too, is there then
    settings = sampling.build(
        fields, context.facts, limits, prompt=len(prompt.ids), max_tokens=1, seed=0, logprobs=None
    )
    seat = OneShotSeat(SessionId(new_session_id()), context.engine)
    if prompt.session is not None and prompt.shared and context.directory.find(prompt.session) is not None:
        context.engine.fork(prompt.session, seat.key, prompt.shared)  # the same worker has the KV
    spec = TurnSpec(
        seat=seat,
        prompt=prompt.ids,
        sampling=settings,
        answer=answer_factory(context, settings, form=Form(), continues=False),
        namespace=namespace(DEFAULT_TENANT, fields.cache_salt),
        priority=fields.priority or 0,
    )
    return Job((spec,), prompt.ids, None, None, lambda: seat.rollback("not started"))
