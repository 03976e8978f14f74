"""POST …/tool_results: results as they come, in any order; with the last one the turn goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from agentserve.server.errors import ApiError, json_response
from agentserve.server.http.context import ServerContext, context_of
from agentserve.server.http.reading import read_body
from agentserve.server.http.sampling import integer
from agentserve.server.http.schemas import decode
from agentserve.server.http.sessions import taking
from agentserve.server.http.sessions.going_on import TurnOptions, next_turn, respond
from agentserve.server.http.sessions.lookup import found
from agentserve.server.http.sessions.taking import Incoming, Taking
from agentserve.server.limits import INT64_MAX, INT64_MIN, Limits, check_text
from agentserve.server.sessions.advice import welcome_back
from agentserve.server.sessions.session_record import Session
from agentserve.server.sessions.transcript import Held, Transcript
from agentserve.server.text_port import JsonObject
from agentserve.types import SessionState

MOST_RESULTS = 1024  # in one request


class ToolResult(msgspec.Struct, kw_only=True):
    call_id: str
    content: str | list[JsonObject]
    epoch: int | None = None


class ResultsBody(TurnOptions, kw_only=True):
    """One result, or several, or none with `continue`."""

    call_id: str | None = None
    content: str | list[JsonObject] | None = None
    epoch: int | None = None  # of every result that has none of its own
    results: list[ToolResult] | None = None
    go_on: bool | None = msgspec.field(name="continue", default=None)


async def tool_results(request: Request) -> Response:
    context = context_of(request)
    limits = context.options.limits
    found(context, request)  # before the body is read: most mistakes are told early
    body = _decoded(await read_body(request, limits.body_bytes), limits)
    body.check()
    results = _checked(body, limits)
    return await take(context, request, results, body, go_on=bool(body.go_on))


async def take(
    context: ServerContext,
    request: Request,
    results: Sequence[Incoming],
    options: TurnOptions,
    *,
    go_on: bool = False,
) -> Response:
    """Take all results or none; begin the turn when no call is outstanding, and answer with its reply.

    An error means that nothing was taken. The turn has begun when the session's lock is given up, so
    of several requests with the last result one begins it and the others find that it runs.
    """
    session = found(context, request)
    async with context.exclusive.of(session.key):
        session = found(context, request)
        taken = _take(context, session, results, go_on=go_on)
        kept = context.chronicle.transcripts.get(session.key)
        driven = context.agents.has(session.tenant, session.public_id)  # then its agent goes on with them
        begins = kept is not None and session.running is None and session.pending and not driven
        if not begins or taking.outstanding(session, kept):
            await _keep(context, session, taken)
            return _receipts(context, session, taken)
        assert kept is not None
        try:
            fields, job = await next_turn(context, session, kept, options)
        except BaseException:
            context.give_back(session, taken.before or kept)
            raise
        for seat in job.seats:
            seat.keep_results()
        _tell(context, session, taken)
    return await respond(context, request, fields, job)


async def hold(context: ServerContext, session: Session, results: Sequence[Incoming]) -> Taken:
    """Take all results or none; whoever goes on with them does so elsewhere. On disk when this returns. The
    caller has the session's lock."""
    taken = _take(context, session, results, go_on=False)
    await _keep(context, session, taken)
    _tell(context, session, taken)
    return taken


async def _keep(context: ServerContext, session: Session, taken: Taken) -> None:
    """On disk when this returns; where it raises, nothing was taken. The caller has the session's lock."""
    with context.chronicle.transcripts.writing(session.key, taken.results.fresh):
        try:
            await context.keep_words(session)
        except BaseException:
            if taken.before is not None:
                context.give_back(session, taken.before)
            raise


@dataclass(frozen=True, slots=True)
class Taken:
    results: Taking
    before: Transcript | None  # as it was until now
    since: float | None  # when the session began to wait


def _take(context: ServerContext, session: Session, results: Sequence[Incoming], *, go_on: bool) -> Taken:
    transcripts = context.chronicle.transcripts
    kept = transcripts.get(session.key)
    sorted_out = taking.sort_out(session, kept, results)
    fresh = dict(sorted_out.fresh)
    if go_on:
        if session.running is not None:
            raise taking.turn_running(session)
        if not session.pending:
            raise ApiError(
                "The session waits for no tool result.", status=409, param="continue", code="nothing_pending"
            )
        if kept is None:
            raise taking.transcript_gone(session)
        made_up = msgspec.json.encode(taking.NO_RESULT)
        for call in taking.outstanding(session, kept):
            fresh.setdefault(call, Held(made_up, b"", session.epoch))
    if fresh:
        transcripts.take(session.key, fresh)
        if transcripts.get(session.key) is None:  # it alone is larger than all may be
            raise taking.transcript_gone(session)
    since = session.history[-1].at if session.state is SessionState.WAITING_TOOL else None
    return Taken(sorted_out, kept, since)


def _tell(context: ServerContext, session: Session, taken: Taken) -> None:
    if session.running is None:
        welcome_back(context.directory, context.engine, session, context.clock.now())
    for call, result in taken.results.fresh.items():
        context.chronicle.say(session, "tool_result", call_id=call, epoch=result.epoch)
        if taken.since is not None and call in session.pending:
            waited = context.clock.now() - taken.since
            context.metrics.tiers.waited(session.pending[call].name, waited)


def _receipts(context: ServerContext, session: Session, taken: Taken) -> Response:
    _tell(context, session, taken)
    kept = context.chronicle.transcripts.get(session.key)
    context.agents.heard(session.tenant, session.public_id)
    statuses = {
        **dict.fromkeys(taken.results.fresh, "taken"),
        **dict.fromkeys(taken.results.repeats, "repeated"),
    }
    reply: JsonObject = {
        "object": "agentserve.tool_results",
        "session_id": session.public_id,
        "epoch": session.epoch,
        "results": [{"call_id": call, "status": status} for call, status in statuses.items()],
        "outstanding": taking.outstanding(session, kept),
        "running_turn": session.running,
    }
    return json_response(reply)


def _decoded(body: bytes, limits: Limits) -> ResultsBody:
    """An object, or a plain list of results."""
    if body.lstrip()[:1] == b"[":
        return ResultsBody(results=decode(body, list[ToolResult], limits))
    return decode(body, ResultsBody, limits)


def _checked(body: ResultsBody, limits: Limits) -> list[Incoming]:
    several = body.results or []
    if len(several) > MOST_RESULTS:
        raise ApiError(f"results: at most {MOST_RESULTS} results in a request", param="results")
    given: list[tuple[str, ToolResult]] = [(f"results[{i}]", result) for i, result in enumerate(several)]
    if body.call_id is not None or body.content is not None:
        if body.call_id is None or body.content is None:
            missing = "call_id" if body.call_id is None else "content"
            raise ApiError(f"{missing}: missing", param=missing, code="invalid_value")
        given.append(("body", ToolResult(call_id=body.call_id, content=body.content)))
    if not given and not body.go_on:
        raise ApiError("call_id: missing; a result or `continue` is needed", param="call_id")
    checked: list[Incoming] = []
    integer("epoch", body.epoch, 0, INT64_MIN, INT64_MAX)
    for param, result in given:
        epoch = body.epoch if result.epoch is None else result.epoch
        integer(f"{param}.epoch", epoch, 0, INT64_MIN, INT64_MAX)
        checked.append(Incoming.checked(result.call_id, result.content, epoch, param))
    check_text((text for result in checked for text in _texts(result.content)), limits, "content")
    return checked


def _texts(content: taking.Content) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [str(part.get("text", part.get("refusal", ""))) for part in content]
