"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from agentserve.messages import Token, TurnUsage
from agentserve.server.errors import json_response
from agentserve.server.http import wire
from agentserve.server.http.chat_request import ChatJob, prepare
from agentserve.server.http.context import ServerContext, context_of
from agentserve.server.http.reading import read_body, set_request_id
from agentserve.server.http.schemas import ChatRequest, JsonObject, decode
from agentserve.server.http.sse import DONE, frame, unless_gone
from agentserve.server.http.streaming import open_stream
from agentserve.server.sessions.answer import Delta, Outcome
from agentserve.server.sessions.identity import SESSION_HEADER
from agentserve.server.sessions.seats import reply_message
from agentserve.server.sessions.turns import Started


async def chat_completions(request: Request) -> Response:
    context = context_of(request)
    limits = context.options.limits
    fields = decode(await read_body(request, limits.body_bytes), ChatRequest, limits)
    set_request_id(request, fields.request_id, limits)
    job = await prepare(context, request, fields)
    reply = _Reply(context, fields, job)
    headers = {SESSION_HEADER: job.session_id}
    try:
        if fields.stream:
            return await open_stream(context, request, reply.stream(), headers, job.rollback)
        return json_response(await unless_gone(request.receive, reply.whole()), headers=headers)
    except BaseException:
        job.rollback()  # of turns that were never begun; others have ended already
        raise


class _Reply:
    """One request's reply, whole or as a stream; both are made of the same pieces."""

    def __init__(self, context: ServerContext, fields: ChatRequest, job: ChatJob) -> None:
        self._context = context
        self._fields = fields
        self._job = job
        options = fields.stream_options
        self._live_usage = bool(options and options.continuous_usage_stats)
        self._usage_asked = bool(options and options.include_usage) or context.options.force_usage
        self._base: JsonObject = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion.chunk" if fields.stream else "chat.completion",
            "created": int(context.wall()),
            "model": fields.model or context.options.model,
            "system_fingerprint": f"agentserve-{context.engine.hello.weights_digest[:12]}",
            "session_id": job.session_id,
        }

    async def whole(self) -> JsonObject:
        outcomes: dict[int, Outcome] = {}
        async with aclosing(self._context.runner.choices([self._job.specs])) as pieces:
            async for index, piece in pieces:
                if isinstance(piece, Outcome):
                    outcomes[index] = piece
        ordered = [outcomes[index] for index in sorted(outcomes)]
        reply = self._base | {
            "choices": [self._choice(index, outcome) for index, outcome in enumerate(ordered)],
            "usage": self._usage([outcome.usage for outcome in ordered]),
        }
        if self._fields.return_token_ids:
            reply["prompt_token_ids"] = self._job.prompt.tolist()
        return reply

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The frames of a streamed reply."""
        finished: dict[int, Outcome] = {}
        rest: dict[int, Delta] = {}  # a last delta without text: its log-probabilities and ids
        counts = [0] * len(self._job.specs)
        async with aclosing(self._context.runner.choices([self._job.specs])) as pieces:
            async for index, piece in pieces:
                if isinstance(piece, Started):
                    yield self._opening(index, counts)
                elif isinstance(piece, Delta):
                    counts[index] += len(piece.ids)
                    if piece:
                        yield self._chunk(index, self._delta(piece), piece, None, counts=counts)
                    else:
                        rest[index] = piece
                else:
                    finished[index] = piece
                    reason = wire.finish_reason(piece, self._job.form.choice == "named")
                    yield self._chunk(index, {}, rest.get(index), reason, counts=counts)
        if self._usage_asked or self._live_usage:
            outcomes = [finished[index] for index in sorted(finished)]
            usage = self._usage([outcome.usage for outcome in outcomes])
            yield frame(self._base | {"choices": [], "usage": usage})
        yield DONE

    def _opening(self, index: int, counts: list[int]) -> bytes:
        extra = {}
        if self._fields.return_token_ids and index == 0:
            extra["prompt_token_ids"] = self._job.prompt.tolist()
        return self._chunk(
            index, {"role": "assistant", "content": ""}, None, None, counts=counts, extra=extra
        )

    def _chunk(
        self,
        index: int,
        delta: JsonObject,
        piece: Delta | None,
        reason: str | None,
        *,
        counts: list[int],
        extra: JsonObject | None = None,
    ) -> bytes:
        choice: JsonObject = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        if piece is not None:
            choice["logprobs"] = self._logprobs(piece.tokens)
            if self._fields.return_token_ids:
                choice["token_ids"] = list(piece.ids)
        if index:
            choice["session_id"] = self._job.seats[index].lease.session.public_id
        chunk = self._base | {"choices": [choice]} | (extra or {})
        if self._live_usage:
            chunk["usage"] = wire.usage(len(self._job.prompt), sum(counts), [], [])
        elif self._usage_asked:
            chunk["usage"] = None
        return frame(chunk)

    @staticmethod
    def _delta(piece: Delta) -> JsonObject:
        delta: JsonObject = {}
        if piece.text:
            delta["content"] = piece.text
        if piece.calls:
            delta["tool_calls"] = [
                {"index": call.index, "function": {"arguments": call.arguments}}
                if call.id is None
                else {
                    "index": call.index,
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in piece.calls
            ]
        return delta

    def _choice(self, index: int, outcome: Outcome) -> JsonObject:
        message = reply_message(outcome) | {"refusal": None, "annotations": []}
        if outcome.calls and not outcome.text:
            message["content"] = None
        choice: JsonObject = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(outcome.tokens),
            "finish_reason": wire.finish_reason(outcome, self._job.form.choice == "named"),
        }
        if index:
            choice["session_id"] = self._job.seats[index].lease.session.public_id
        if self._fields.return_token_ids:
            choice["token_ids"] = list(outcome.ids)
        return choice

    def _logprobs(self, tokens: tuple[Token, ...]) -> JsonObject | None:
        if self._job.logprobs is None or not tokens:
            return None if self._job.logprobs is None else {"content": [], "refusal": None}
        return wire.chat_logprobs(tokens, self._context.tokenizer, self._job.logprobs)

    def _usage(self, turns: list[TurnUsage]) -> JsonObject:
        completion = sum(turn.generated for turn in turns)
        return wire.usage(len(self._job.prompt), completion, turns[:1], turns)
