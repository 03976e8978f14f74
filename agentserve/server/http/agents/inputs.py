"""POST …/events: what a client says to its session: messages, tool results, cancel."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from agentserve.server.agents.history import History
from agentserve.server.agents.records import OUTSIDE, CallItem, Decision, OutputItem, Turn
from agentserve.server.agents.runners import ToolOutcome
from agentserve.server.errors import ApiError
from agentserve.server.http.agents.asked import input_texts, outcome_of
from agentserve.server.http.agents.lookup import session_of
from agentserve.server.http.agents.schemas import (
    ApprovalInput,
    CancelInput,
    EventsRequest,
    MessageInput,
    ResultInput,
)
from agentserve.server.http.agents.sessions import ask
from agentserve.server.http.agents.shown import request_id
from agentserve.server.http.context import ServerContext, context_of
from agentserve.server.http.idempotency import HEADER
from agentserve.server.http.names import TURN_HEADER
from agentserve.server.http.reading import read_body
from agentserve.server.http.schemas import decode
from agentserve.server.http.sessions.results import MOST_RESULTS
from agentserve.server.limits import check_text
from agentserve.server.sessions.transcript import result_digest


async def send_events(request: Request) -> Response:
    """Tool results or approvals, all of which are taken or none; or a cancel, a message, or both so. The
    reply to a message names its turn."""
    context = context_of(request)
    limits = context.options.limits
    session_of(context, request)  # before the body is read: most mistakes are told early
    body = decode(await read_body(request, limits.body_bytes), EventsRequest, limits)
    history = session_of(context, request)
    events = body.events
    results = [event for event in events if isinstance(event, ResultInput)]
    approvals = [event for event in events if isinstance(event, ApprovalInput)]
    if approvals and len(approvals) == len(events) <= MOST_RESULTS:
        await _decisions(context, history, approvals)
        return Response(status_code=202)
    if results and len(results) == len(events) <= MOST_RESULTS:
        await _results(context, history, results)
        return Response(status_code=202)
    match events:
        case [CancelInput()]:
            await context.agents.cancel(history)
        case [MessageInput()] | [CancelInput(), MessageInput()]:
            message = events[-1]
            assert isinstance(message, MessageInput)
            place = f"events[{len(events) - 1}].input"
            texts = input_texts(message.input, place)
            check_text((text for each in texts for text in each), limits, place)
            key = request.headers.get(HEADER)
            known = (turn for turn in history.turns if key is not None and turn.key == key)
            turn = next(known, None)  # the answer was lost, and the server with it
            if turn is None and len(events) > 1:
                await context.agents.cancel(history)
            if turn is None:
                turn = await ask(context, session_of(context, request), texts, key)
            return Response(status_code=202, headers={TURN_HEADER: turn.id})
        case _:
            raise ApiError(
                f"events: up to {MOST_RESULTS} tool results or approvals; or a cancel, a message, or both so",
                param="events",
                code="invalid_value",
            )
    return Response(status_code=202)


async def _results(context: ServerContext, history: History, results: Sequence[ResultInput]) -> None:
    waited: dict[str, ToolOutcome] = {}
    late: dict[str, tuple[CallItem, Turn, ToolOutcome]] = {}
    for index, result in enumerate(results):
        place = f"events[{index}]"
        outcome = outcome_of(result, place)
        check_text(_texts(outcome), context.options.limits, f"{place}.output")
        found = sort_out(history, result, outcome)
        if found is None:
            continue
        call, turn = found
        before = waited.get(call.call) or (late[call.call][2] if call.call in late else None)
        if before is not None and result_digest(before.content) != result_digest(outcome.content):
            raise _conflict(result.call_id)
        if call.background:
            late[call.call] = (call, turn, outcome)
        else:
            waited[call.call] = outcome
    if waited:
        driver = context.agents.driver(history)
        if driver is None:
            raise unknown_call(next(iter(waited)))
        await driver.take(waited)
    for call, turn, outcome in late.values():
        if call.call not in history.outputs():
            await context.agents.background_result(history, turn, call, outcome)


async def _decisions(context: ServerContext, history: History, given: Sequence[ApprovalInput]) -> None:
    said = history.approvals()
    fresh: dict[str, tuple[CallItem, Decision]] = {}
    for event in given:
        call, turn = _asked(history, event.request_id)
        decision = event.response.decision
        before = said.get(call.call)
        known = before.decision if before is not None else fresh[call.call][1] if call.call in fresh else None
        if known is not None and known != decision:
            raise ApiError(
                f"{event.request_id[:80]!r} has another decision already.",
                status=409,
                param="request_id",
                code="decision_conflict",
            )
        if before is None and turn.over:
            raise _unknown_request(event.request_id)
        if known is None:
            fresh[call.call] = (call, decision)
    driver = context.agents.driver(history)
    for call, decision in fresh.values():
        if driver is None:
            raise _unknown_request(request_id(call))
        await driver.decide(call, decision)


def _asked(history: History, id_: str) -> tuple[CallItem, Turn]:
    """The call that is to be approved by this name."""
    for item, of in history.items():
        if isinstance(item, CallItem) and item.approval and item.whole and request_id(item) == id_:
            turn = history.turn(of)
            if turn is not None:
                return item, turn
    raise _unknown_request(id_)


def _unknown_request(id_: str) -> ApiError:
    return ApiError(
        f"No approval is asked for as {id_[:80]!r}.",
        status=400,
        param="request_id",
        code="unknown_approval_request",
    )


def sort_out(history: History, result: ResultInput, outcome: ToolOutcome) -> tuple[CallItem, Turn] | None:
    """The call that a result is for; None: it has this one already. ApiError for what does not fit."""
    found = history.call(result.call_id)
    if found is None or found[1].id != result.turn_id:
        raise unknown_call(result.call_id)
    call, turn = found
    output = history.outputs().get(call.call)
    if output is not None:
        if result_digest(_content(output)) == result_digest(outcome.content):
            return None
        raise _conflict(call.call)
    if call.kind not in OUTSIDE or not call.whole or (turn.over and not call.background):
        raise unknown_call(result.call_id)
    return call, turn


def _content(output: OutputItem) -> object:
    return ToolOutcome("" if output.output is None else output.output, output.error).content


def _texts(outcome: ToolOutcome) -> list[str]:
    content = outcome.content
    return [content] if isinstance(content, str) else [str(part["text"]) for part in content]


def unknown_call(call: str) -> ApiError:
    """The openai SDK knows this message: it tries again, for a result may come before its call is known."""
    return ApiError(
        f"Unknown pending tool call: {call}",
        param="call_id",
        code="invalid_request_error",
    )


def _conflict(call: str) -> ApiError:
    return ApiError(
        f"{call[:80]!r} has another result already.", status=409, param="call_id", code="result_conflict"
    )
