"""From a chat body to turns that are ready to run: checks, session, prompt, sampling."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import msgspec
from msgspec.structs import replace
from starlette.requests import Request

from agentserve.server.errors import ApiError
from agentserve.server.http import history, sampling
from agentserve.server.http.answer_form import Form, chat_form
from agentserve.server.http.callers import tenant_of
from agentserve.server.http.claims import claim_of, cut_calls
from agentserve.server.http.context import ServerContext
from agentserve.server.http.names import NOBODY, Identity, identity
from agentserve.server.http.promised import promise_of, said_in
from agentserve.server.http.said import take_advice
from agentserve.server.http.schemas import ChatRequest
from agentserve.server.http.turn_parts import (
    answer_begins_behind,
    answer_factory,
    namespace,
    prompt_end,
    reasoning_cap,
)
from agentserve.server.http.vllm_forms import as_response_format, other_form, said_as
from agentserve.server.limits import INT64_MAX, Limits, check_size
from agentserve.server.sessions.seats import SessionSeat
from agentserve.server.sessions.session_record import Claim, Lease
from agentserve.server.sessions.transcript import Told, result_digest
from agentserve.server.sessions.turns import TurnSpec
from agentserve.server.text_port import ChatTemplate, JsonObject
from agentserve.slo_classes import Promise
from agentserve.types import Sampling
from tools_bridge.call_syntax import CallSyntax

NOTHING: Mapping[int, Sequence[int]] = MappingProxyType({})
NOT_KNOWN: Mapping[int, str] = MappingProxyType({})

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

_OF_ONE_REQUEST = frozenset(
    {
        "messages",
        "stream",
        "stream_options",
        "n",
        "session_id",
        "request_id",
        "add_generation_prompt",
        "continue_final_message",
        "vllm_xargs",
        "nvext",
    }
)
"""Fields that say nothing about the turns after."""


@dataclass(frozen=True, slots=True)
class ChatJob:
    specs: tuple[TurnSpec, ...]
    seats: tuple[SessionSeat, ...]
    prompt: array[int]
    form: Form
    logprobs: int | None

    @property
    def session_id(self) -> str:
        return self.seats[0].lease.session.public_id

    def rollback(self) -> None:
        for seat in self.seats:
            seat.rollback("not started")


async def prepare(context: ServerContext, request: Request, fields: ChatRequest) -> ChatJob:
    """The turns of a chat request, for the session it belongs to."""
    limits = context.options.limits
    whose = identity(request.headers, fields.session_id, limits, fields.vllm_xargs)
    fields = replace(fields, slo=said_in(request.headers, fields.slo))  # the session's next turns have it too

    def begin(claim: Claim) -> Lease:
        lease = context.directory.begin(claim, context.clock.now())
        for tool, seconds in lease.waits:
            context.metrics.tiers.waited(tool, seconds)
        return lease

    return await prepare_turns(context, tenant_of(request), fields, begin, whose)


async def prepare_turns(
    context: ServerContext,
    tenant: str,
    fields: ChatRequest,
    begin: Callable[[Claim], Lease],
    whose: Identity = NOBODY,
) -> ChatJob:
    """Check everything, then take the leases: `begin` gives the first. On any error nothing is left
    behind."""
    limits = context.options.limits
    context.check_model(fields.model)
    sampling.check_fields(fields, context.facts, limits)
    check_supported(fields)
    promise = promise_of(context, tenant, fields)
    logprobs = asked_logprobs(fields, limits.top_logprobs)
    cut = cut_calls(context, tenant, fields.messages)
    messages, told = await context.off_loop(_read, fields, limits, cut, context.tool_parser.written)
    with said_as(fields):
        fields = as_response_format(fields)  # the transcript keeps what was sent
        tools = history.tool_dicts(fields.tools, limits)
        form, grammar = await grammar_of(context, tenant, fields, tools)
    template = template_of(context, tenant)
    claim = await claim_of(context, tenant, fields, messages, cut=cut, whose=whose)
    await context.check_storage()
    lease = begin(claim)
    seats = [_seat(context, lease, told)]
    try:
        prompt, tail = await context.off_loop(_prompt, template, fields, messages, tools, lease)
        if lease.copied_from is not None:  # the sibling begins where the KV they share is
            context.engine.fork(lease.copied_from.key, lease.key, lease.shared)
        settings = sampling.build(
            fields,
            context.facts,
            limits,
            prompt=len(prompt),
            max_tokens=fields.max_tokens
            if fields.max_completion_tokens is None
            else fields.max_completion_tokens,
            seed=context.new_seed(),
            logprobs=logprobs,
        )
        keep = context.chronicle.transcripts.siblings(told)
        for index in range(sampling.choices(fields, limits) - 1):
            sibling = context.directory.sibling(lease.session, claim.keys, context.clock.now())
            seats.append(_seat(context, sibling, told if index < keep else None))
        for seat in seats:
            seat.tail = tail
        continues = bool(fields.continue_final_message)
        before = answer_begins_behind(context, messages, prompt, continues)
        cap = reasoning_cap(context, fields.thinking_token_budget, before, continues=continues)
        settings = replace(settings, reasoning=cap)
        specs = tuple(
            _spec(
                context,
                fields,
                seat,
                prompt=prompt,
                settings=_settings(settings, index, grammar),
                form=form,
                before=before,
                promise=promise,
            )
            for index, seat in enumerate(seats)
        )
        take_advice(context, lease.session, whose, fields)
    except BaseException:
        for seat in seats:
            seat.rollback("not started")
        raise
    return ChatJob(specs, tuple(seats), prompt, form, logprobs)


async def grammar_of(
    context: ServerContext, tenant: str, fields: ChatRequest, tools: list[JsonObject]
) -> tuple[Form, str | None]:
    """What the answer must look like, and the id of the grammar for it, which the workers then have."""
    form = other_form(chat_form(fields, tools, context.options.limits), fields)
    template = template_of(context, tenant)
    ending = await context.off_loop(prompt_ending, context, template, fields) if form.constrained else ""
    try:
        return form, await context.grammars.define(form, ending, tenant)
    except ApiError as error:
        raise _at_its_tool(error, fields) from None


def _at_its_tool(error: ApiError, fields: ChatRequest) -> ApiError:
    """Grammars know tools by name, the request by their place."""
    if error.param != "tools":
        return error
    for index, tool in enumerate(fields.tools or ()):
        ours = f"tools.{tool.function.name}.parameters" if tool.function else ""
        if ours and error.message.startswith(ours):
            place = f"tools[{index}].function.parameters"
            message = place + error.message.removeprefix(ours)
            return ApiError(message, status=error.status, param=place, code=error.code)
    return error


def render(
    template: ChatTemplate,
    fields: ChatRequest,
    messages: list[JsonObject],
    tools: list[JsonObject],
    spliced: Mapping[int, Sequence[int]] = NOTHING,
    *,
    tails: Mapping[int, str] = NOT_KNOWN,
) -> array[int]:
    """The prompt's ids; the session's own replies as the ids that were generated (`spliced`), behind what
    their prompts ended with (`tails`)."""
    goes_on = bool(fields.continue_final_message)
    if goes_on and (fields.add_generation_prompt or messages[-1]["role"] != "assistant"):
        raise ApiError(
            "continue_final_message: needs an assistant message at the end and no add_generation_prompt",
            param="continue_final_message",
        )
    return template.render(
        messages,
        tools=_listed(fields, tools),
        add_generation_prompt=not goes_on and fields.add_generation_prompt is not False,
        continue_final_message=goes_on,
        kwargs=template_settings(fields),
        spliced=spliced,
        tails=tails,
    )


def _prompt(
    template: ChatTemplate,
    fields: ChatRequest,
    messages: list[JsonObject],
    tools: list[JsonObject],
    lease: Lease,
) -> tuple[array[int], str]:
    """The prompt of a session's turn, and what it ends with behind its last message."""
    prompt = render(template, fields, messages, tools, lease.spliced, tails=lease.session.tails)
    if fields.continue_final_message or fields.add_generation_prompt is False:
        return prompt, ""
    settings = template_settings(fields)
    return prompt, template.tail(messages, tools=_listed(fields, tools), kwargs=settings)


def _listed(fields: ChatRequest, tools: list[JsonObject]) -> list[JsonObject] | None:
    """The tools that stand where all do: not those that are found later."""
    late = {tool.function.name for tool in fields.tools or () if tool.function and tool.defer_loading}
    listed = [tool for tool in tools if tool["function"]["name"] not in late] if late else tools
    return listed or None


def template_settings(fields: ChatRequest) -> JsonObject | None:
    """What the template may look at: what the client says, and `reasoning_effort` by the names that
    templates know it by."""
    effort = fields.reasoning_effort
    if effort is None:
        return fields.chat_template_kwargs
    ours: JsonObject = {"reasoning_effort": effort}
    if effort == "none":
        ours = {"enable_thinking": False, "thinking": False}
    return ours | (fields.chat_template_kwargs or {})


def prompt_ending(context: ServerContext, template: ChatTemplate, fields: ChatRequest) -> str:
    """The text that a prompt of such a request ends with, whatever is in it: before there is a prompt, it
    tells whether the answer begins with reasoning."""
    if fields.continue_final_message or fields.add_generation_prompt is False:
        return ""
    anything: list[JsonObject] = [{"role": "user", "content": "."}]
    return prompt_end(context, render(template, fields, anything, []))


def template_of(context: ServerContext, tenant: str) -> ChatTemplate:
    """The model's, for one tenant's requests."""
    if context.template is None:
        raise ApiError("This model has no chat template; use /v1/completions.", code="no_chat_template")
    return context.template.apart(tenant)


def check_supported(fields: ChatRequest) -> None:
    if fields.functions:
        raise ApiError("functions: not supported; use tools", param="functions", code="unsupported_parameter")
    if fields.reasoning_effort is not None and fields.reasoning_effort not in EFFORTS:
        raise ApiError(
            f"reasoning_effort: {fields.reasoning_effort!r} is not one of {', '.join(EFFORTS)}",
            param="reasoning_effort",
        )
    sampling.integer("thinking_token_budget", fields.thinking_token_budget, 0, 0, INT64_MAX)


def asked_logprobs(fields: ChatRequest, most: int) -> int | None:
    """Alternatives to each token of an answer; None: not even its own."""
    if fields.top_logprobs is None:
        return 0 if fields.logprobs else None
    top = sampling.integer("top_logprobs", fields.top_logprobs, 0, 0, most)
    if not fields.logprobs:
        if top:
            raise ApiError("top_logprobs: needs logprobs true", param="top_logprobs")
        return None
    return top


def _read(
    fields: ChatRequest, limits: Limits, cut: Collection[str], written: CallSyntax
) -> tuple[list[JsonObject], Told]:
    """The messages, checked and in one shape, and what the session's transcript keeps of the request."""
    check_size(fields.chat_template_kwargs, limits.template_kwargs_bytes, "chat_template_kwargs")
    messages = history.message_dicts(fields.messages, limits, cut, written=written)
    settings = msgspec.to_builtins(replace(fields, messages=[]), str_keys=True)
    kept = {
        name: value for name, value in settings.items() if value is not None and name not in _OF_ONE_REQUEST
    }
    results = set(history.trailing_call_ids(messages))
    told = Told(
        messages=msgspec.json.encode(fields.messages),
        settings=msgspec.json.encode(kept),
        results={
            message["tool_call_id"]: result_digest(message["content"])
            for message in messages
            if message["role"] == "tool" and message["tool_call_id"] in results
        },
    )
    return messages, told


def _seat(context: ServerContext, lease: Lease, told: Told | None) -> SessionSeat:
    return SessionSeat(
        lease,
        context.directory,
        context.engine,
        context.clock,
        context.chain,
        chronicle=context.chronicle,
        told=told,
    )


def _settings(settings: Sampling, index: int, grammar: str | None) -> Sampling:
    return replace(settings, seed=sampling.choice_seed(settings.seed, index), grammar=grammar)


def _spec(
    context: ServerContext,
    fields: ChatRequest,
    seat: SessionSeat,
    *,
    prompt: array[int],
    settings: Sampling,
    form: Form,
    before: str,
    promise: Promise,
) -> TurnSpec:
    continues = bool(fields.continue_final_message)
    return TurnSpec(
        seat=seat,
        tenant=seat.lease.session.tenant,
        prompt=prompt,
        sampling=settings,
        answer=answer_factory(context, settings, form=form, before=before, continues=continues),
        namespace=namespace(seat.lease.session.tenant, fields.cache_salt),
        priority=fields.priority or 0,
        promise=promise,
        watch=seat.watch,
    )
