"""POST /v1/conversations; GET, POST, DELETE of one; its items."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from agentserve.server.errors import ApiError, json_response
from agentserve.server.http.callers import tenant_of
from agentserve.server.http.context import ServerContext, context_of
from agentserve.server.http.reading import read_body
from agentserve.server.http.responses.conversations import Conversation, shown
from agentserve.server.http.responses.desk import new_id
from agentserve.server.http.responses.items import Reference, read_input
from agentserve.server.http.responses.lists import Wanted, page, wanted
from agentserve.server.http.responses.plan import check_metadata
from agentserve.server.http.responses.references import not_found, twice
from agentserve.server.http.responses.schemas import ConversationRequest, ItemsRequest
from agentserve.server.http.schemas import Body, decode
from agentserve.server.sessions.book import booked
from agentserve.server.text_port import JsonObject

MOST_ITEMS = 1000  # in one request; OpenAI's is 20


async def create_conversation(request: Request) -> Response:
    context = context_of(request)
    body = await _body(context, request, ConversationRequest)
    check_metadata(body.metadata)
    context.check_stored(tenant_of(request))
    items = _read(context, body.items or [], None)
    made = Conversation(new_id("conv"), context.wall(), body.metadata, tenant_of(request))
    await booked(context.responses.conversations.open(made, items))
    return json_response(made.shown())


async def get_conversation(request: Request) -> Response:
    return json_response(_found(context_of(request), request).shown())


async def update_conversation(request: Request) -> Response:
    context = context_of(request)
    body = await _body(context, request, ConversationRequest)
    check_metadata(body.metadata)
    found = _found(context, request)
    await booked(context.responses.conversations.describe(found, body.metadata or {}))
    return json_response(found.shown())


async def delete_conversation(request: Request) -> Response:
    """Its items go with it; responses that were made in it stay, but nothing can go on from them."""
    context = context_of(request)
    id_ = _found(context, request).id
    await booked(context.responses.conversations.delete(id_))
    return json_response({"id": id_, "object": "conversation.deleted", "deleted": True})


async def list_items(request: Request) -> Response:
    context = context_of(request)
    found = _found(context, request)
    items = await context.off_loop(shown, found.entries())
    return json_response(page(items, wanted(request)))


async def add_items(request: Request) -> Response:
    context = context_of(request)
    body = await _body(context, request, ItemsRequest)
    found = _found(context, request)
    context.check_stored(found.tenant)
    items = _read(context, body.items, found)
    conversations = context.responses.conversations
    conversations.lock(found.id)
    try:
        await booked(conversations.add(found, items))
    finally:
        conversations.busy.discard(found.id)
    return json_response(page(items, Wanted("asc", MOST_ITEMS)))


async def get_item(request: Request) -> Response:
    found = _found(context_of(request), request)
    entry = found.entry(request.path_params["item"])
    if entry is None:
        raise not_found("Item", request.path_params["item"], code="item_not_found")
    return json_response(entry.shown())


async def delete_item(request: Request) -> Response:
    context = context_of(request)
    found = _found(context, request)
    if found.entry(request.path_params["item"]) is None:
        raise not_found("Item", request.path_params["item"], code="item_not_found")
    await booked(context.responses.conversations.remove(found, request.path_params["item"]))
    return json_response(found.shown())


def _read(
    context: ServerContext, items: list[JsonObject], conversation: Conversation | None
) -> list[JsonObject]:
    given = read_input(items, new_id, most=MOST_ITEMS, param="items")
    seen: set[str] = set()
    for item, place in zip(given.items, given.places, strict=True):
        if isinstance(item, Reference):
            raise ApiError(f"{place}: a conversation takes items, not references", param=place)
        if item["id"] in seen or (conversation is not None and item["id"] in conversation):
            raise twice(place, item["id"])
        seen.add(item["id"])
    return [item for item in given.items if not isinstance(item, Reference)]


async def _body(context: ServerContext, request: Request, kind: type[Body]) -> Body:
    """An empty body is one that says nothing."""
    limits = context.options.limits
    return decode(await read_body(request, limits.body_bytes) or b"{}", kind, limits)


def _found(context: ServerContext, request: Request) -> Conversation:
    id_ = request.path_params["id"]
    found = context.responses.conversations.get(id_)
    if found is None or found.tenant != tenant_of(request):
        raise not_found("Conversation", id_, code="conversation_not_found")
    return found
