"""POST /v1/tool_callbacks/{token}: a webhook's receiver posts a tool's result later.

The token is all that it needs: it is for one call of one turn. The call takes the first result; the same
one again is a receipt, another is refused.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from agentserve.server.agents.history import History
from agentserve.server.agents.records import CallItem, Turn
from agentserve.server.agents.runners import ToolOutcome
from agentserve.server.errors import ApiError
from agentserve.server.http.context import ServerContext, context_of
from agentserve.server.http.reading import read_body
from agentserve.server.limits import check_depth, check_text
from agentserve.server.sessions.transcript import result_digest
from agentserve.server.webhooks.runner import outcome_of
from tools_bridge.webhooks.callback import Call
from tools_bridge.webhooks.replies import Answered, Never, Taken, judge
from tools_bridge.webhooks.types import Kind

MOST_BODY = 1 << 20  # bytes, as of a reply to a delivery


async def tool_callback(request: Request) -> Response:
    """202: the result is taken, and on disk where sessions are kept. 404: the token is none; 409: the call
    has another result; 410: nobody waits for it any more."""
    context = context_of(request)
    counts = context.hooks.counts
    counts["refused"] += 1
    call = context.hooks.tokens.read(request.path_params["token"])
    if call is None:
        raise ApiError("No such callback.", status=404, code="callback_not_found")
    _open_call(context, call)  # before the body is read
    outcome = await _outcome(context, request)
    history, item, turn = _open_call(context, call)
    output = history.outputs().get(item.call)
    if output is not None:
        before = ToolOutcome("" if output.output is None else output.output, output.error)
        if result_digest(before.content) != result_digest(outcome.content):
            if item.deadline is not None and context.hooks.now() >= item.deadline:
                raise _over("its time is over")
            raise ApiError("The call has another result already.", status=409, code="result_conflict")
    elif (driver := context.agents.driver(history)) is None or turn.over:
        raise _over("its turn is over")
    else:
        await driver.take({item.call: outcome})
    counts["refused"] -= 1
    counts["callbacks"] += 1
    return Response(status_code=202)


def _open_call(context: ServerContext, call: Call) -> tuple[History, CallItem, Turn]:
    history = context.agents.shelf.find(call.session)
    if history is None:
        raise _over("its session is gone")
    found = history.call(call.call_id)
    if found is None or found[1].number != call.epoch or found[0].kind != "webhook":
        raise _over("its turn was taken back")
    item, turn = found
    if turn.over and item.call not in history.outputs():
        raise _over("its turn is over")
    return history, item, turn


async def _outcome(context: ServerContext, request: Request) -> ToolOutcome:
    limits = context.options.limits
    body = await read_body(request, min(MOST_BODY, limits.body_bytes))
    check_depth(body, limits.json_depth, limits.json_containers)
    answer = Answered(200, content_type="application/json", body=body)
    match judge(Kind.TOOL, answer, 0.0):
        case Taken(result) if result is not None:
            outcome = outcome_of(result)
        case Never(_, error):
            raise ApiError(
                f"The body is no tool result: {error.partition(': ')[2].partition(' (')[0]}.",
                code="invalid_value",
            )
        case _:
            raise ApiError("The body is no tool result: it is empty.", code="invalid_value")
    content = outcome.content
    texts = [content] if isinstance(content, str) else [str(part["text"]) for part in content]
    check_text(texts, limits, "output")
    return outcome


def _over(why: str) -> ApiError:
    return ApiError(f"Nobody waits for this result: {why}.", status=410, code="call_over")
