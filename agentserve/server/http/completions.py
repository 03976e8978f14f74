"""POST /v1/completions: text or token ids in, text out. No session: each choice is one shot."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from agentserve.messages import Token
from agentserve.server.errors import ApiError, context_too_long, json_response
from agentserve.server.http import choice_parts, sampling
from agentserve.server.http.answer_form import Form, response_schema
from agentserve.server.http.callers import tenant_of
from agentserve.server.http.choices_reply import ChoicesReply
from agentserve.server.http.context import ServerContext, context_of
from agentserve.server.http.names import set_request_id
from agentserve.server.http.promised import promise_of, said_in
from agentserve.server.http.reading import read_body
from agentserve.server.http.schemas import CompletionRequest, decode
from agentserve.server.http.sse import unless_gone
from agentserve.server.http.streaming import open_stream
from agentserve.server.http.turn_parts import answer_factory, namespace
from agentserve.server.http.vllm_forms import as_response_format, other_form, said_as
from agentserve.server.limits import Limits, check_text
from agentserve.server.sessions.answer import Delta, Outcome
from agentserve.server.sessions.identity import new_session_id
from agentserve.server.sessions.seats import OneShotSeat
from agentserve.server.sessions.turns import TurnSpec
from agentserve.server.text_port import JsonObject
from agentserve.slo_classes import Promise
from agentserve.types import Sampling, SessionId


@dataclass(frozen=True, slots=True)
class _Job:
    groups: tuple[tuple[TurnSpec, ...], ...]  # one per prompt
    echoes: tuple[str, ...]  # one per prompt; empty without echo
    logprobs: int | None

    def rollback(self) -> None:
        for group in self.groups:
            for spec in group:
                spec.seat.rollback("not started")

    def echo(self, index: int) -> str:
        return self.echoes[index // len(self.groups[0])]


async def completions(request: Request) -> Response:
    context = context_of(request)
    limits = context.options.limits
    fields = decode(await read_body(request, limits.body_bytes), CompletionRequest, limits)
    set_request_id(request, fields.request_id, limits)
    fields = replace(fields, slo=said_in(request.headers, fields.slo))
    job = await _prepare(context, tenant_of(request), fields)
    shape = _TextShape(context, job, token_ids=bool(fields.return_token_ids))
    base: JsonObject = {"object": "text_completion"}
    reply = ChoicesReply(context, fields, job.groups, shape, base=base, id_prefix="cmpl")
    if fields.stream:
        return await open_stream(context, request, reply.stream(), {}, job.rollback)
    return json_response(await unless_gone(request.receive, reply.whole()))


async def _prepare(context: ServerContext, tenant: str, fields: CompletionRequest) -> _Job:
    limits = context.options.limits
    context.check_model(fields.model)
    sampling.check_fields(fields, context.facts, limits)
    promise = promise_of(context, tenant, fields)
    logprobs = fields.logprobs
    if logprobs is not None:
        logprobs = sampling.integer("logprobs", logprobs, 0, 0, limits.top_logprobs)
    if fields.echo and logprobs is not None:
        raise ApiError("echo: not supported together with logprobs", param="echo")
    if fields.suffix:
        raise ApiError("suffix: not supported", param="suffix")
    n = sampling.choices(fields, limits)
    if fields.best_of is not None and fields.best_of != n:
        raise ApiError("best_of: not supported unless equal to n", param="best_of")
    prompts = _prompts(fields.prompt, limits, context.facts.max_model_len)
    if len(prompts) * n > limits.total_choices:
        raise _too_many(limits)
    with said_as(fields):
        fields = as_response_format(fields)
        wants_json, schema = response_schema(fields.response_format, limits)
        form = other_form(Form(json=wants_json, schema=schema), fields)
        grammar = await context.grammars.define(form, tenant=tenant)
    encoded = [await _encoded(context, tenant, index, prompt) for index, prompt in enumerate(prompts)]
    default_seed = context.new_seed()

    def group(prompt: array[int]) -> tuple[TurnSpec, ...]:
        settings = sampling.build(
            fields,
            context.facts,
            limits,
            prompt=len(prompt),
            max_tokens=context.options.default_max_tokens if fields.max_tokens is None else fields.max_tokens,
            seed=default_seed,
            logprobs=logprobs,
            param="prompt",
        )
        return tuple(
            _spec(
                context,
                tenant,
                fields,
                prompt,
                replace(settings, seed=sampling.choice_seed(settings.seed, i), grammar=grammar),
                promise=promise,
            )
            for i in range(n)
        )

    echoes = tuple(
        (prompt if isinstance(prompt, str) else context.tokenizer.decode(ids)) if fields.echo else ""
        for prompt, ids in zip(prompts, encoded, strict=True)
    )
    return _Job(tuple(group(prompt) for prompt in encoded), echoes, logprobs)


def _spec(
    context: ServerContext,
    tenant: str,
    fields: CompletionRequest,
    prompt: array[int],
    settings: Sampling,
    *,
    promise: Promise,
) -> TurnSpec:
    return TurnSpec(
        seat=OneShotSeat(SessionId(new_session_id()), context.engine),
        tenant=tenant,
        prompt=prompt,
        sampling=settings,
        answer=answer_factory(context, settings, continues=True),
        namespace=namespace(tenant, fields.cache_salt),
        priority=fields.priority or 0,
        promise=promise,
    )


def _too_many(limits: Limits) -> ApiError:
    return ApiError(
        f"prompt: at most {limits.prompts} prompts and {limits.total_choices} choices in all", param="prompt"
    )


def _prompts(
    prompt: str | Sequence[str | int | list[int]], limits: Limits, max_model_len: int
) -> list[str | list[int]]:
    """The four forms a prompt may have, as a list of prompts. Lengths come before looks at items."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError("prompt: must not be empty", param="prompt")
    if isinstance(prompt[0], int):
        _check_length(prompt, max_model_len)
    elif len(prompt) > limits.prompts:
        raise _too_many(limits)
    if all(isinstance(item, int) for item in prompt):
        return [[item for item in prompt if isinstance(item, int)]]
    texts_or_ids = [item for item in prompt if not isinstance(item, int)]
    if len({type(item) for item in prompt}) != 1:
        raise ApiError("prompt: texts and token ids cannot be mixed", param="prompt")
    return texts_or_ids


def _check_length(ids: Sequence[object], max_model_len: int) -> None:
    if len(ids) >= max_model_len:
        raise context_too_long(len(ids), max_model_len, "prompt")


async def _encoded(context: ServerContext, tenant: str, index: int, prompt: str | list[int]) -> array[int]:
    facts = context.facts
    if isinstance(prompt, str):
        check_text([prompt], context.options.limits, "prompt")
        ids = await context.off_loop(context.tokenizer.apart(tenant).encode_completion, prompt)
    else:
        _check_length(prompt, facts.max_model_len)
        await context.off_loop(sampling.token_ids, f"prompt[{index}]", prompt, facts.vocab_size)
        ids = prompt
    if not ids:
        raise ApiError(f"prompt[{index}]: has no tokens", param="prompt")
    return array("i", ids)


class _TextShape:
    """OpenAI's text choices."""

    def __init__(self, context: ServerContext, job: _Job, *, token_ids: bool) -> None:
        self._context = context
        self._job = job
        self._token_ids = token_ids
        self._offsets = [0] * sum(len(group) for group in job.groups)  # characters streamed, by choice

    def opening(self, index: int) -> JsonObject | None:
        echo = self._job.echo(index)
        return {"choices": [self._chunk(index, echo, None, None)]} if echo else None

    def delta(self, index: int, piece: Delta) -> JsonObject:
        return self._chunk(index, piece.text, piece, None)

    def ending(self, index: int, outcome: Outcome, rest: Delta | None) -> JsonObject:
        return self._chunk(index, "", rest, choice_parts.finish_reason(outcome, named=False))

    def choice(self, index: int, outcome: Outcome) -> JsonObject:
        choice: JsonObject = {
            "index": index,
            "text": self._job.echo(index) + outcome.text,
            "logprobs": self._logprobs(outcome.tokens, 0),
            "finish_reason": choice_parts.finish_reason(outcome, named=False),
        }
        if self._token_ids:
            n = len(self._job.groups[0])
            choice["prompt_token_ids"] = self._job.groups[index // n][0].prompt.tolist()
            choice["token_ids"] = list(outcome.ids)
        return choice

    def _chunk(self, index: int, text: str, piece: Delta | None, reason: str | None) -> JsonObject:
        choice: JsonObject = {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
        if piece is not None:
            if piece.tokens:
                choice["logprobs"] = self._logprobs(piece.tokens, self._offsets[index])
            if self._token_ids:
                choice["token_ids"] = list(piece.ids)
            self._offsets[index] += len(text)
        return choice

    def _logprobs(self, tokens: tuple[Token, ...], offset: int) -> JsonObject | None:
        if self._job.logprobs is None:
            return None
        return choice_parts.legacy_logprobs(tokens, self._context.tokenizer, self._job.logprobs, offset)
