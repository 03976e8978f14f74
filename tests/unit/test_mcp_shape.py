"""What a server says is held to its form before it is checked by the protocol."""

from __future__ import annotations

from typing import Any

import pytest

from tools_bridge.mcp.shape import MOST_ELSE, Misshapen, is_large, sifted

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": True},
    "required": ["a"],
    "x": [1] * 5000,
}
TOOL = {"name": "t", "description": "d", "inputSchema": SCHEMA}
TEXT = {"type": "text", "text": "hi"}


def test_what_is_read_stays_and_what_nobody_reads_goes() -> None:
    more = {"icons": [1] * 9999, "annotations": {"x": [1] * 9999}, "_meta": {"x": [1] * 9999}}
    listed = sifted({"tools": [TOOL | more], "nextCursor": "n", "_meta": {"x": [1] * 9999}})
    assert listed == {"tools": [TOOL], "nextCursor": "n"}
    blocks = [
        TEXT,
        {"type": "image", "data": "AA==", "mimeType": "image/png"},
        {"type": "resource_link", "name": "n", "uri": "file:///x"},
        {"type": "resource", "resource": {"uri": "file:///x", "text": "t", "mimeType": "text/plain"}},
        {"type": "resource", "resource": {"uri": "file:///x", "blob": "AA=="}},
    ]
    given = {"content": [block | more for block in blocks], "structuredContent": {"a": [1] * 9999}}
    assert sifted(given | {"isError": False}) == {
        "content": blocks,
        "structuredContent": {"a": [1] * 9999},
        "isError": False,
    }
    hello = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "n"}}
    assert sifted(hello) == hello


@pytest.mark.parametrize(
    "result",
    [
        {"tools": 1},
        {"tools": [1]},
        {"tools": [{"name": 1, "inputSchema": {}}]},
        {"tools": [{"name": "t"}]},
        {"tools": [TOOL | {"inputSchema": SCHEMA | {"required": [1]}}]},
        {"tools": [TOOL | {"inputSchema": SCHEMA | {"required": "a"}}]},
        {"tools": [TOOL | {"inputSchema": SCHEMA | {"properties": {"a": 1}}}]},
        {"tools": [TOOL | {"inputSchema": SCHEMA | {"properties": []}}]},
        {"tools": [TOOL | {"inputSchema": SCHEMA | {"$schema": []}}]},
        {"content": "hi"},
        {"content": [1]},
        {"content": [{"type": "odd"}]},
        {"content": [{"type": []}]},
        {"content": [{"type": "text"}]},
        {"content": [{"type": "text", "text": ["x"]}]},
        {"content": [{"type": "resource", "resource": {"uri": "x"}}]},
        {"content": [], "isError": [[]] * MOST_ELSE},
        {"protocolVersion": ["x"] * MOST_ELSE},
    ],
)
def test_what_is_wrong_is_looked_at_no_further(result: Any) -> None:
    with pytest.raises(Misshapen):
        sifted(result)


def test_large_is_known_without_looking_at_all_of_it() -> None:
    assert not is_large({"a": [1, {"b": None}]}, 5)
    assert is_large({"a": [1, {"b": None}]}, 4)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert is_large(deep, 10)
