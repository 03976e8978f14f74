"""POST /v1/chat/completions."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from agentserve.messages import Token
from agentserve.server.errors import json_response
from agentserve.server.http import choice_parts
from agentserve.server.http.chat_request import ChatJob, prepare
from agentserve.server.http.choices_reply import ChoicesReply
from agentserve.server.http.context import REASONING_FIELDS, ServerContext, context_of
from agentserve.server.http.names import SESSION_HEADER, set_request_id
from agentserve.server.http.reading import read_body
from agentserve.server.http.schemas import ChatRequest, decode
from agentserve.server.http.sse import unless_gone
from agentserve.server.http.streaming import open_stream
from agentserve.server.sessions.answer import Delta, Outcome
from agentserve.server.sessions.seats import reply_message
from agentserve.server.text_port import JsonObject


async def chat_completions(request: Request) -> Response:
    context = context_of(request)
    limits = context.options.limits
    fields = decode(await read_body(request, limits.body_bytes), ChatRequest, limits)
    context.check_named(fields.model)
    set_request_id(request, fields.request_id, limits)
    job = await prepare(context, request, fields)
    headers = {SESSION_HEADER: job.session_id}
    try:
        reply = chat_reply(context, fields, job)
        if fields.stream:
            return await open_stream(context, request, reply.stream(), headers, job.rollback)
        body = await unless_gone(request.receive, reply.whole())
        if fields.return_token_ids:
            body["prompt_token_ids"] = job.prompt.tolist()
        return json_response(body, headers=headers)
    except BaseException:
        job.rollback()  # of turns that were never begun; others have ended already
        raise


def chat_reply(context: ServerContext, fields: ChatRequest, job: ChatJob) -> ChoicesReply:
    """The turns' reply, not yet begun."""
    base: JsonObject = {
        "object": "chat.completion.chunk" if fields.stream else "chat.completion",
        "session_id": job.session_id,
    }
    shape = _ChatShape(context, job, token_ids=bool(fields.return_token_ids))
    return ChoicesReply(context, fields, [job.specs], shape, base=base, id_prefix="chatcmpl")


class _ChatShape:
    """OpenAI's messages and deltas."""

    def __init__(self, context: ServerContext, job: ChatJob, *, token_ids: bool) -> None:
        self._context = context
        self._job = job
        self._token_ids = token_ids

    def opening(self, index: int) -> JsonObject:
        chunk: JsonObject = {
            "choices": [self._chunk(index, {"role": "assistant", "content": self._no_text()}, None, None)]
        }
        if self._token_ids and index == 0:
            chunk["prompt_token_ids"] = self._job.prompt.tolist()
        return chunk

    def delta(self, index: int, piece: Delta) -> JsonObject:
        delta = self._reasoning(piece.reasoning)
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
                if call.id is not None or call.arguments
            ]
        return self._chunk(index, delta, piece, None)

    def ending(self, index: int, outcome: Outcome, rest: Delta | None) -> JsonObject:
        return self._chunk(index, {}, rest, self._finish_reason(outcome))

    def choice(self, index: int, outcome: Outcome) -> JsonObject:
        message = reply_message(outcome) | {"refusal": None, "annotations": []}
        for name in REASONING_FIELDS:
            message.pop(name, None)
        message |= self._reasoning(outcome.reasoning)
        if not outcome.text:
            message["content"] = None if outcome.calls else self._no_text()
        choice: JsonObject = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(outcome.tokens),
            "finish_reason": self._finish_reason(outcome),
        }
        if index:
            choice["session_id"] = self._job.seats[index].lease.session.public_id
        if self._token_ids:
            choice["token_ids"] = list(outcome.ids)
        return choice

    def _chunk(self, index: int, delta: JsonObject, piece: Delta | None, reason: str | None) -> JsonObject:
        choice: JsonObject = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        if piece is not None:
            choice["logprobs"] = self._logprobs(piece.tokens)
            if self._token_ids:
                choice["token_ids"] = list(piece.ids)
        if index:
            choice["session_id"] = self._job.seats[index].lease.session.public_id
        return choice

    def _reasoning(self, text: str) -> JsonObject:
        """Under every name that clients look for it by."""
        return dict.fromkeys(self._context.options.reasoning_fields, text) if text else {}

    def _no_text(self) -> str | None:
        """An answer that must be calls has no text, not an empty one."""
        return None if self._job.form.forced else ""

    def _finish_reason(self, outcome: Outcome) -> str:
        return choice_parts.finish_reason(outcome, named=self._job.form.choice == "named")

    def _logprobs(self, tokens: tuple[Token, ...]) -> JsonObject | None:
        if self._job.logprobs is None:
            return None
        return choice_parts.chat_logprobs(tokens, self._context.tokenizer, self._job.logprobs)
