"""Lists of items, a page at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from starlette.requests import Request

from agentserve.server.errors import ApiError
from agentserve.server.http import query
from agentserve.server.text_port import JsonObject

MOST, USUAL = 100, 20
MOST_BYTES = 4 << 20  # of a page that has more than one: a hundred large ones would hold up everybody


@dataclass(frozen=True, slots=True)
class Wanted:
    order: str = "desc"  # newest first
    limit: int = USUAL
    after: str | None = None  # the last item that its reader has


def wanted(request: Request) -> Wanted:
    """`after`, `limit` and `order` of a request. ApiError."""
    order = query.text(request, "order")
    if order not in (None, "asc", "desc"):
        raise ApiError("order: must be asc or desc", param="order")
    limit = query.whole(request, "limit")
    if limit is not None and not 1 <= limit <= MOST:
        raise ApiError(f"limit: must be between 1 and {MOST}", param="limit")
    return Wanted(order or "desc", USUAL if limit is None else limit, query.text(request, "after"))


def page(items: Sequence[JsonObject], asked: Wanted) -> JsonObject:
    """As many as are asked for and have room. ApiError where `after` is none of them."""
    ordered = list(items) if asked.order == "asc" else list(reversed(items))
    if asked.after is not None:
        place = next((i for i, item in enumerate(ordered) if item["id"] == asked.after), None)
        if place is None:
            raise ApiError(f"after: {asked.after[:80]!r} is not an item of this list", param="after")
        ordered = ordered[place + 1 :]
    shown = list(_with_room(ordered[: asked.limit]))
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(shown) < len(ordered),
    }


def _with_room(items: Sequence[JsonObject]) -> Iterator[JsonObject]:
    """The first, and those behind it as far as all are no larger than a page."""
    room = MOST_BYTES
    for number, item in enumerate(items):
        room -= len(msgspec.json.encode(item))
        if number and room < 0:
            return
        yield item
