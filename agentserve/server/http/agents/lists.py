"""GET …/items, …/turns, …/turns/{turn}, …/turns/{turn}/items: all that there was, whatever a stream lost."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from agentserve.server.errors import json_response
from agentserve.server.http.agents.lookup import session_of, turn_of
from agentserve.server.http.agents.shown import item_objects, turn_object
from agentserve.server.http.context import context_of
from agentserve.server.http.responses.lists import page, wanted


async def list_items(request: Request) -> Response:
    history = session_of(context_of(request), request)
    return json_response(page(item_objects(history), wanted(request)))


async def list_turns(request: Request) -> Response:
    history = session_of(context_of(request), request)
    turns = [turn_object(history, turn) for turn in history.turns]
    return json_response(page(turns, wanted(request)))


async def get_turn(request: Request) -> Response:
    return json_response(turn_object(*turn_of(context_of(request), request)))


async def list_turn_items(request: Request) -> Response:
    history, turn = turn_of(context_of(request), request)
    return json_response(page(item_objects(history, turn.id), wanted(request)))
