"""The turn of one response, ready to run."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from msgspec.structs import replace
from starlette.requests import Request

from agentserve.server.errors import ApiError
from agentserve.server.http.ahead_of_turn import look_over, warming
from agentserve.server.http.callers import tenant_of
from agentserve.server.http.chat_request import prepare
from agentserve.server.http.context import ServerContext
from agentserve.server.http.schemas import ChatRequest
from agentserve.server.limits import utf8_bytes
from agentserve.server.sessions.advice import settle
from agentserve.server.sessions.session_record import Lease
from agentserve.server.sessions.turns import TurnSpec
from agentserve.server.text_port import JsonObject, Tokenizer

Made = TypeVar("Made")
TOO_LONG = "context_length_exceeded"
_SHARE = 4  # of the history is left out at a time
_OPENING = ("system", "developer")
_MERGED = 2  # tokens that a text may lose to those beside it


@dataclass(frozen=True, slots=True)
class Job:
    specs: tuple[TurnSpec, ...]
    prompt: array[int]
    session: str | None  # public id; None: it is nobody's
    logprobs: int | None
    rollback: Callable[[], None]
    unheard: Callable[[str], None]  # its turn is committed, and nobody will be told


async def turn_job(context: ServerContext, request: Request, fields: ChatRequest, *, shorten: bool) -> Job:
    """The session's next turn, leased. `shorten`: a history that is too long loses its beginning."""
    job = await _fitting(context, request, fields, prepare, shorten=shorten)
    unheard = partial(_unheard, context, job.seats[0].lease)
    return Job(job.specs, job.prompt, job.session_id, job.logprobs, job.rollback, unheard)


async def check_turn(context: ServerContext, request: Request, fields: ChatRequest, *, shorten: bool) -> None:
    """Refuse what `turn_job` would refuse; nothing is leased. ApiError."""
    await _fitting(context, request, fields, look_over, shorten=shorten)


async def _fitting(
    context: ServerContext,
    request: Request,
    fields: ChatRequest,
    attempt: Callable[[ServerContext, Request, ChatRequest], Awaitable[Made]],
    *,
    shorten: bool,
) -> Made:
    """A history loses a quarter at a time, so that turns which follow each other lose the same. What cannot
    fit by the count of its texts' tokens is not tried."""
    counted = False
    while True:
        try:
            return await attempt(context, request, fields)
        except ApiError as error:
            shorter = shortened(fields.messages) if shorten and error.code == TOO_LONG else None
            if shorter is None:
                raise
            if not counted:
                counted = True
                most = context.facts.max_model_len
                tokenizer = context.tokenizer.apart(tenant_of(request))
                shorter = await context.off_loop(may_fit, shorter, tokenizer, most)
            fields = replace(fields, messages=shorter)


def _unheard(context: ServerContext, lease: Lease, reason: str) -> None:
    context.directory.unheard(lease, reason, context.clock.now())
    settle(context.directory, context.engine, context.chronicle)


async def warming_job(context: ServerContext, request: Request, fields: ChatRequest) -> Job:
    """`prewarm`: nobody's turn, so that the one asked for later finds its prompt computed. What a session's
    tools are still running for is not touched."""
    spec = await warming(context, request, fields)
    return Job(
        (spec,), spec.prompt, None, None, lambda: spec.seat.rollback("not started"), lambda reason: None
    )


def shortened(messages: list[JsonObject]) -> list[JsonObject] | None:
    """Without the oldest quarter of what follows the system's messages: at least up to the next user's.
    None where nothing can go."""
    start = next(
        (i for i, message in enumerate(messages) if message["role"] not in _OPENING),
        len(messages),
    )
    least = start + max(1, (len(messages) - start) // _SHARE)
    kept = next((i for i in range(least, len(messages)) if messages[i]["role"] == "user"), None)
    return None if kept is None else messages[:start] + messages[kept:]


def may_fit(messages: list[JsonObject], tokenizer: Tokenizer, most: int) -> list[JsonObject]:
    """The first of these and what `shortened` makes of them, again and again, whose texts alone do not have
    `most` tokens; the last where all have."""
    longest = max(map(len, tokenizer.token_bytes), default=1)
    start = next((i for i, one in enumerate(messages) if one["role"] not in _OPENING), len(messages))
    left = most - sum(_least(one, tokenizer, longest, most) for one in messages[:start])
    rest = 0  # messages at the end that may fit
    for message in reversed(messages[start:]):
        left -= _least(message, tokenizer, longest, most)
        if left <= 0:
            break
        rest += 1
    while len(messages) - start > rest and (shorter := shortened(messages)) is not None:
        messages = shorter
    return messages


def _least(message: JsonObject, tokenizer: Tokenizer, longest: int, most: int) -> int:
    """Tokens that a message takes at least, however its template shows it; `most` is as good as more."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    found = 0
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            continue
        if message["role"] == "assistant":
            text = text.rpartition("</think>")[2]  # what was thought before may be left out
        text = text.strip()
        if utf8_bytes(text) >= most * longest:
            return most
        found += max(0, len(tokenizer.encode(text)) - _MERGED)
    return found
