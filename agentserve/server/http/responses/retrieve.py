"""GET, DELETE /v1/responses/{id}, POST …/cancel, GET …/input_items."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from agentserve.server.errors import ApiError, json_response
from agentserve.server.http import query
from agentserve.server.http.context import context_of
from agentserve.server.http.responses.following import NO_HEADERS, follow, found
from agentserve.server.http.responses.lists import page, wanted
from agentserve.server.http.responses.plan import conversations_of, runs_of
from agentserve.server.http.responses.references import not_found
from agentserve.server.sessions.book import booked
from agentserve.server.text_port import JsonObject


async def get_response(request: Request) -> Response:
    """The response as it is. With `?stream=true`, its events: those of a background response from
    `starting_after` on, as they were and as they come; of others, as they could have been."""
    context = context_of(request)
    kept = found(context, request, request.path_params["id"])
    if query.flag(request, "stream"):
        after = query.whole(request, "starting_after")
        return await follow(context, request, kept, after, NO_HEADERS)
    live = context.responses.live(kept.id)
    return json_response(kept.shown() if live is None else live.fold.response)


async def delete_response(request: Request) -> Response:
    """What goes on from it keeps its history; nobody can name it any more."""
    context = context_of(request)
    kept = found(context, request, request.path_params["id"])
    live = context.responses.live(kept.id)
    if live is not None:
        await live.cancel()
        context.responses.lives.forget(live)
    if context.responses.shelf.get(kept.id) is not None:
        await booked(context.responses.shelf.delete(kept.id))
    return json_response({"id": kept.id, "object": "response", "deleted": True})


async def cancel_response(request: Request) -> Response:
    """Stop a background response. One that is over stays as it is."""
    context = context_of(request)
    kept = found(context, request, request.path_params["id"])
    shown = kept.shown()
    if not shown["background"]:
        raise ApiError("Only a background response can be cancelled.", code="not_in_background")
    live = context.responses.live(kept.id)
    if live is not None:
        await live.cancel()
        shown = live.fold.response
    return json_response(shown)


async def input_items(request: Request) -> Response:
    """All that the model read for it, instructions apart: the history that it goes on from, too."""
    context = context_of(request)
    kept = found(context, request, request.path_params["id"])
    chain = context.responses.shelf.chain(kept.id)
    if chain is None:
        raise not_found("The history of response", kept.id)
    runs = await context.off_loop(runs_of, chain, conversations_of(context.responses, chain))
    items: list[JsonObject] = [item for run in runs[:-1] for item in run]
    return json_response(page(items, wanted(request)))
