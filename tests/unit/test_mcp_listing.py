"""What is taken of listings and results of MCP servers, and of what clients say of servers. Pure."""

from __future__ import annotations

from typing import Any

import pytest

from agentserve.server.errors import ApiError
from agentserve.server.http.agents.servers import read_servers, server_object
from agentserve.text.conversation import unread
from tests.mcp_rig import ADD, SUB, URL, server
from tools_bridge.mcp import listing
from tools_bridge.mcp.listing import called, taken
from tools_bridge.mcp.results import answer, reason, secrets_of, without
from tools_bridge.mcp.types import ListedTool, Place

ANY: dict[str, Any] = {"type": "object"}


def test_tools_are_sorted_and_chosen() -> None:
    assert taken([SUB, ADD]) == ([ADD, SUB], 0)
    assert taken([SUB, ADD], ("sub", "none")) == ([SUB], 0)
    assert taken([SUB, ADD], ()) == ([], 0)
    assert taken([ADD, SUB, ListedTool("add", "Another.", ANY)]) == ([ADD, SUB], 1)


def test_tools_are_bounded() -> None:
    deep: dict[str, Any] = {}
    for _ in range(listing.MOST_DEPTH):
        deep = {"properties": deep}
    large = {"type": "object", "description": "x" * listing.MOST_SCHEMA}
    odd = [ListedTool("deep", "", deep), ListedTool("large", "", large), ListedTool("", "", ANY)]
    odd.append(ListedTool("n" * 129, "", ANY))
    odd += [ListedTool("nan", "", {"default": float("nan")}), ListedTool("big", "", {"default": 10**5000})]
    assert taken([*odd, ADD]) == ([ADD], 6)
    ((tool,), _) = taken([ListedTool("long", "d" * 10_000, ANY)])
    assert len(tool.description) == listing.MOST_DESCRIPTION
    many = [ListedTool(f"t{i:04}", "", ANY) for i in range(500)]
    found, left_out = taken(reversed(many))
    assert (found, left_out) == (many[: listing.MOST_TOOLS], 500 - listing.MOST_TOOLS)
    heavy = [ListedTool(f"t{i}", "", {"description": "x" * 30_000}) for i in range(20)]
    assert 5 < len(taken(heavy)[0]) < 10


def test_names_that_clash_have_the_label_before_them() -> None:
    names = called([("a", ["add", "go"]), ("b", ["add", "find it/now"])], ["go"])
    assert names == {
        ("a", "add"): "a_add",
        ("b", "add"): "b_add",
        ("a", "go"): "a_go",
        ("b", "find it/now"): "find_it_now",
    }
    twice = called([("a", ["x/y", "x y"])], ["a_x_y"])
    assert list(twice.values()) == ["a_x_y_2", "a_x_y_3"]
    long = called([("l" * 64, ["n" * 128, "n" * 127 + "!"])], ["n" * 128])
    assert len(set(long.values())) == 2
    assert all(len(name) <= 128 for name in long.values())


@pytest.mark.parametrize(
    ("content", "structured", "text"),
    [
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], None, "a\nb"),
        ([{"type": "text", "text": "{}"}], {"x": 1}, "{}"),
        ([], {"x": "é"}, '{"x": "é"}'),
        ([], None, ""),
        ([{"type": "image", "data": "AA"}], {"x": 1}, f'{unread("image")}\n{{"x": 1}}'),
        ([{"type": "audio", "data": "AA"}], None, unread("audio") or "[audio: not readable by this model]"),
        ([{"type": "resource", "resource": {"uri": "f:x", "text": "inside"}}], None, "inside"),
        ([{"type": "resource_link", "name": "n", "uri": "f:x"}], None, "[n: f:x]"),
        ([{"type": "odd"}], None, "[odd: not readable by this model]"),
    ],
)
def test_results_are_read(content: list[dict[str, Any]], structured: object, text: str) -> None:
    assert answer(content, structured, failed=False, unread=unread).text == text
    assert answer(content, structured, failed=True, unread=unread).failed


def test_words_of_servers_are_short_and_without_secrets() -> None:
    secrets = secrets_of({"authorization": "Bearer abcdefghij", "x": "1"})
    assert secrets == ["Bearer abcdefghij", "abcdefghij"]
    assert without("no: abcdefghij, Bearer abcdefghij", secrets) == "no: [secret], [secret]"
    assert reason("a\n  b") == "a b"
    assert len(reason("x" * 10_000)) == 501
    assert "abcdefghij" not in repr(Place(URL, {"authorization": "abcdefghij"}))


def test_servers_are_read_in_both_ways_of_writing() -> None:
    transport = {
        "type": "http",
        "server_url": URL + "?key=k",
        "authorization": "Token t",
        "headers": {"X-A": "b"},
    }
    agents: dict[str, Any] = {"type": "mcp", "server_label": "a", "transport": transport}
    responses = server(
        authorization="t", headers={"Authorization": "gone"}, allowed_tools={"tool_names": ["z", "b"]}
    )
    one, two = read_servers([agents, {"type": "function", "name": "f"}, responses], "tools")
    assert one.headers == {"x-a": "b", "authorization": "Token t"}
    assert two.headers == {"authorization": "Bearer t"}
    assert one.asks("any")  # as at OpenAI, where nothing is said
    assert not two.asks("any")
    assert (one.allowed, two.allowed) == (None, ("b", "z"))
    assert server_object(one)["transport"] == {"type": "http", "server_url": URL, "headers": {}}
    assert "Token" not in repr(one)


@pytest.mark.parametrize(
    ("given", "asked", "free"),
    [
        ("always", ["x", "y", "z"], []),
        ("never", [], ["x", "y", "z"]),
        ({"never": {"tool_names": ["x"]}}, ["y", "z"], ["x"]),
        ({"always": {"tool_names": ["x"]}}, ["x"], ["y", "z"]),
        ({"always": {"tool_names": ["x"]}, "never": {"tool_names": ["x", "y"]}}, ["x", "z"], ["y"]),
    ],
)
def test_who_needs_approval(given: object, asked: list[str], free: list[str]) -> None:
    (made,) = read_servers([server(require_approval=given)], "tools")
    assert [name for name in ("x", "y", "z") if made.asks(name)] == asked
    assert [name for name in ("x", "y", "z") if not made.asks(name)] == free
    (again,) = read_servers([server(require_approval=server_object(made)["require_approval"])], "tools")
    assert again == made


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"server_label": "a b"}, "server_label"),
        ({"server_label": None}, "server_label"),
        ({"server_url": 5}, "server_url"),
        ({"transport": {"type": "stdio", "command": "sh"}}, "transport"),
        ({"transport": "http"}, "transport"),
        ({"headers": {"Host": "x"}}, "headers"),
        ({"headers": {"mcp-session-id": "x"}}, "headers"),
        ({"headers": {"a": "1", "A": "2"}}, "headers"),
        ({"headers": {"x": "secret\r\ny: z"}}, "headers.x"),
        ({"headers": ["x"]}, "headers"),
        ({"authorization": "sec ret\n"}, "authorization"),
        ({"require_approval": "sometimes"}, "require_approval"),
        ({"require_approval": {}}, "require_approval"),
        ({"allowed_tools": "add"}, "allowed_tools"),
        ({"allowed_tools": {"read_only": True}}, "allowed_tools.read_only"),
        ({"credential_id": "c"}, "credential_id"),
        ({"connection_origin": "environment"}, "connection_origin"),
        ({"timeout": True}, "timeout"),
        ({"timeout": 1e9}, "timeout"),
        ({"required": 1}, "required"),
    ],
)
def test_servers_that_are_refused(fields: dict[str, Any], place: str) -> None:
    with pytest.raises(ApiError) as refused:
        read_servers([server(**fields)], "agent.tools")
    assert refused.value.param == f"agent.tools[0].{place}"
    assert "secret" not in refused.value.message


def test_labels_are_of_one_server_each() -> None:
    with pytest.raises(ApiError, match="label of two"):
        read_servers([server(), server()], "tools")
    with pytest.raises(ApiError, match="at most 16"):
        read_servers([server(server_label=f"s{i}") for i in range(17)], "tools")
