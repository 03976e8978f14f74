"""Lists of items, a page at a time. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentserve.server.errors import ApiError
from agentserve.server.text_port import JsonObject

MOST, USUAL = 100, 20


def page(items: Sequence[JsonObject], query: Mapping[str, str]) -> JsonObject:
    """`after`, `limit` and `order` (newest first where it is not said). ApiError."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError("order: must be asc or desc", param="order")
    given = query.get("limit", str(USUAL))
    if not given.isdecimal() or len(given) > 9 or not 1 <= int(given) <= MOST:
        raise ApiError(f"limit: must be between 1 and {MOST}", param="limit")
    ordered = list(items) if order == "asc" else list(reversed(items))
    after = query.get("after")
    if after is not None:
        place = next((i for i, item in enumerate(ordered) if item["id"] == after), None)
        if place is None:
            raise ApiError(f"after: {after[:80]!r} is not an item of this list", param="after")
        ordered = ordered[place + 1 :]
    shown = ordered[: int(given)]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(shown) < len(ordered),
    }
