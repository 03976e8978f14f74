"""What of a server's message is handed to whoever checks it by the protocol. Pure.

That check tells all that is wrong with a message, each thing for each kind that it could have been: a reply
of 180 KB that was wrong throughout took it seconds, in which nobody else was served. So what is read here is
held to its form first, up to the first thing that is wrong; what nobody reads is left out; and of all else,
which is small in any honest message, there is little.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools_bridge.mcp.types import JsonObject

MOST_ELSE = 1000  # objects, lists and values of what is not known here, in one message
_BLOCKS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "text": (("text",), ()),
    "image": (("data", "mimeType"), ()),
    "audio": (("data", "mimeType"), ()),
    "resource_link": (("name", "uri"), ("mimeType",)),
    "resource": ((), ()),
}
"""Texts that a block has, and may have, beside its type."""


class Misshapen(ValueError):
    pass


def sifted(result: JsonObject) -> JsonObject:
    """What a reply says, as far as it is read. Misshapen."""
    known: JsonObject = {}
    rest = {name: value for name, value in result.items() if name != "_meta"}
    if "tools" in rest:
        known["tools"] = [_tool(tool) for tool in _list(rest.pop("tools"))]
    if "content" in rest:
        known["content"] = [_block(block) for block in _list(rest.pop("content"))]
    if "structuredContent" in rest:  # it may be anything
        known["structuredContent"] = rest.pop("structuredContent")
    if is_large(rest):
        raise Misshapen
    return rest | known


def is_large(value: object, most: int = MOST_ELSE) -> bool:
    """There are more things in it."""
    left, count = [value], 0
    while left:
        one = left.pop()
        count += 1
        if isinstance(one, dict):
            left.extend(one.values())
        elif isinstance(one, list):
            left.extend(one)
        if count + len(left) > most:
            return True
    return False


def _tool(tool: object) -> JsonObject:
    found = _texts(tool, ("name",), ("description",))
    assert isinstance(tool, dict)
    schema = tool.get("inputSchema")
    if not isinstance(schema, dict):
        raise Misshapen
    properties, required = schema.get("properties"), schema.get("required")
    if not (
        isinstance(schema.get("$schema"), str | None)
        and isinstance(properties, dict | None)
        and all(isinstance(one, dict | bool) for one in (properties or {}).values())
        and isinstance(required, list | None)
        and all(isinstance(one, str) for one in required or ())
    ):
        raise Misshapen
    return {**found, "inputSchema": schema}


def _block(block: object) -> JsonObject:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str) or kind not in _BLOCKS:
        raise Misshapen
    found = _texts(block, *_BLOCKS[kind])
    if kind == "resource":
        assert isinstance(block, dict)
        inside = block.get("resource")
        has = "text" if isinstance(inside, dict) and "text" in inside else "blob"
        found["resource"] = _texts(inside, ("uri", has), ("mimeType",))
    return {"type": kind, **found}


def _texts(given: object, must: tuple[str, ...], may: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise Misshapen
    found = {name: given[name] for name in (*must, *may) if given.get(name) is not None}
    if not all(isinstance(one, str) for one in found.values()) or not all(name in found for name in must):
        raise Misshapen
    return found


def _list(given: object) -> list[object]:
    if not isinstance(given, list):
        raise Misshapen
    return given
