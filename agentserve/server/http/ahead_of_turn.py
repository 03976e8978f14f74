"""The prompt that a request's turn would have, before there is a turn: to be counted, or computed for
nobody so that the turn finds it. Nothing is leased, and no session changes."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from msgspec.structs import replace
from starlette.requests import Request

from agentserve.server.http import history, sampling
from agentserve.server.http.answer_form import Form
from agentserve.server.http.callers import tenant_of
from agentserve.server.http.chat_request import (
    asked_logprobs,
    check_supported,
    grammar_of,
    render,
    template_of,
)
from agentserve.server.http.claims import claim_of, cut_calls
from agentserve.server.http.context import ServerContext
from agentserve.server.http.names import identity
from agentserve.server.http.promised import promise_of, said_in
from agentserve.server.http.schemas import ChatRequest
from agentserve.server.http.turn_parts import answer_factory, namespace
from agentserve.server.http.vllm_forms import as_response_format, said_as
from agentserve.server.limits import check_size
from agentserve.server.sessions.identity import new_session_id
from agentserve.server.sessions.seats import OneShotSeat
from agentserve.server.sessions.session_record import Session, common
from agentserve.server.sessions.turns import TurnSpec
from agentserve.types import SessionId


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: array[int]
    session: Session | None  # the one whose history it goes on from
    shared: int  # tokens they have in common, at least


async def prompt_of(context: ServerContext, request: Request, fields: ChatRequest) -> Prompt:
    """As `chat_request.prepare` makes it: with the ids that the request's session generated, which need
    not be those that its text would be encoded to."""
    limits = context.options.limits
    context.check_model(fields.model)
    whose = identity(request.headers, fields.session_id, limits, fields.vllm_xargs)
    tenant = tenant_of(request)
    cut = cut_calls(context, tenant, fields.messages)
    messages = await context.off_loop(
        history.message_dicts, fields.messages, limits, cut, written=context.tool_parser.written
    )
    tools = history.tool_dicts(fields.tools, limits)
    claim = await claim_of(context, tenant, fields, messages, cut=cut, whose=whose)
    session = context.directory.foresee(claim)
    same = 0 if session is None else common(session.chain, claim.keys)
    replies = {} if session is None else {i: ids for i, ids in session.replies.items() if i < same}
    tails = {} if session is None else dict(session.tails)
    ids = await context.off_loop(
        render, template_of(context, tenant), fields, messages, tools, replies, tails=tails
    )
    return Prompt(ids, session, 0 if session is None else session.tokens_at(same))


async def look_over(context: ServerContext, request: Request, fields: ChatRequest) -> None:
    """Refuse what `chat_request.prepare` would refuse. ApiError."""
    limits, tenant = context.options.limits, tenant_of(request)
    context.check_model(fields.model)
    sampling.check_fields(fields, context.facts, limits)
    check_supported(fields)
    promise_of(context, tenant, replace(fields, slo=said_in(request.headers, fields.slo)))
    logprobs = asked_logprobs(fields, limits.top_logprobs)
    check_size(fields.chat_template_kwargs, limits.template_kwargs_bytes, "chat_template_kwargs")
    prompt = await prompt_of(context, request, fields)
    with said_as(fields):
        asked = as_response_format(fields)
        await grammar_of(context, tenant, asked, history.tool_dicts(asked.tools, limits))
    await context.check_storage()
    most = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    sampling.build(
        fields, context.facts, limits, prompt=len(prompt.ids), max_tokens=most, seed=0, logprobs=logprobs
    )


async def warming(context: ServerContext, request: Request, fields: ChatRequest) -> TurnSpec:
    """A turn of one token, for nobody, that leaves the prompt's KV behind. Refused as the request itself
    would be."""
    limits, tenant = context.options.limits, tenant_of(request)
    sampling.check_fields(fields, context.facts, limits)
    check_supported(fields)
    prompt = await prompt_of(context, request, fields)
    with said_as(fields):
        asked = as_response_format(fields)
        tools = history.tool_dicts(asked.tools, limits)
        await grammar_of(context, tenant, asked, tools)  # it is there then, too
    settings = sampling.build(
        fields, context.facts, limits, prompt=len(prompt.ids), max_tokens=1, seed=0, logprobs=None
    )
    seat = OneShotSeat(SessionId(new_session_id()), context.engine)
    session = prompt.session
    if session is not None and prompt.shared and context.directory.find(session.key) is not None:
        context.engine.fork(session.key, seat.key, prompt.shared)  # where its KV is
    return TurnSpec(
        seat=seat,
        tenant=tenant,
        prompt=prompt.ids,
        sampling=settings,
        answer=answer_factory(context, settings, form=Form(), continues=False),
        namespace=namespace(tenant, fields.cache_salt),
        priority=fields.priority or 0,
    )
