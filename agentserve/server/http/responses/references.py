"""Items that a request names instead of sending them, and how much it may come to with all that it names
and packs."""

from __future__ import annotations

import re
from collections.abc import Mapping

from agentserve.server.errors import ApiError
from agentserve.server.http.context import ServerContext
from agentserve.server.http.responses.items import Given, Reference
from agentserve.server.http.responses.shelf import Kept
from agentserve.server.http.responses.thoughts import Room
from agentserve.server.sessions.transcript import write_json
from agentserve.server.text_port import JsonObject

_OURS = re.compile(r"[a-z]+_[0-9a-f]{48}")  # `desk.new_id`
_READ = 4  # times what a request may come to is read for it: an item lies among others

Found = dict[str, tuple[JsonObject, int]]
"""Items by their ids, and their bytes."""


def not_found(what: str, id_: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(f"{what} {id_[:80]!r} was not found.", status=404, param=param, code=code)


def twice(place: str, id_: str) -> ApiError:
    """An item's id is its own within a conversation."""
    return ApiError(f"{place}.id: {id_[:80]!r} is in it already", param=f"{place}.id", code="duplicate_item")


async def resolved(
    context: ServerContext, tenant: str, given: Given, known: set[str], room: Room, *, once: bool
) -> tuple[list[JsonObject], list[str]]:
    """The request's own items, references looked up; one to what the history has anyway says nothing.

    Elsewhere only ids that this server made are looked for: those that clients choose need not be theirs
    alone. `once`: no item may be there twice.
    """
    found = await _found(context, tenant, given, known, room.left)
    items: list[JsonObject] = []
    places: list[str] = []
    for item, place in zip(given.items, given.places, strict=True):
        if not isinstance(item, Reference):
            if once and item["id"] in known:
                raise twice(place, item["id"])
            items.append(item)
        elif item.id in known:
            continue
        else:
            if item.id not in found:  # what was said before a response failed is no item of it any more
                raise not_found(f"{place}: item", item.id, place, "item_not_found")
            named, size = found[item.id]
            room.take(size)
            items.append(named)
        if once:
            known.add(items[-1]["id"])
        places.append(place)
    return items, places


async def _found(
    context: ServerContext, tenant: str, given: Given, known: set[str], most: int
) -> Mapping[str, tuple[JsonObject, int]]:
    shelf = context.responses.shelf
    owners: dict[str, tuple[Kept, set[str]]] = {}
    for item, place in zip(given.items, given.places, strict=True):
        if not isinstance(item, Reference) or item.id in known:
            continue
        owner = shelf.owner(tenant, item.id) if _OURS.fullmatch(item.id) else None
        if owner is None:
            raise not_found(f"{place}: item", item.id, place, "item_not_found")
        owners.setdefault(owner.id, (owner, set()))[1].add(item.id)
    return await context.off_loop(_read, list(owners.values()), Room(_READ * most)) if owners else {}


def _read(owners: list[tuple[Kept, set[str]]], room: Room) -> Found:
    found: Found = {}
    for owner, names in owners:
        room.take(len(owner.response))
        items = owner.output()
        if not names <= {item["id"] for item in items}:
            room.take(len(owner.items))
            items = [*owner.own_items(), *items]
        found |= {item["id"]: (item, len(write_json(item))) for item in items if item["id"] in names}
    return found
