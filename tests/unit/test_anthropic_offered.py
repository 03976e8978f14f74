"""Tools of Messages bodies: which the model is offered, and where it reads of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentserve.server.errors import ApiError
from agentserve.server.http.anthropic.asked import Asked
from agentserve.server.http.schemas import NamedChoice
from tests.anthropic_bodies import TOOL, USER, ask, refused, result, use


def test_tools_without_a_schema_are_left_out() -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    ours = ask(
        tools=[search, TOOL | {"strict": True, "cache_control": {"type": "ephemeral"}}, {"type": "new"}]
    )
    assert ours.chat.tools is not None
    [tool] = ours.chat.tools
    assert tool.function is not None
    assert (tool.function.name, tool.function.parameters, tool.function.strict) == (
        "weather",
        {"type": "object"},
        True,
    )
    assert ask(tools=[search]).chat.tools is None


@pytest.mark.parametrize(
    ("choice", "ours", "parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", None),
        ({"type": "auto", "disable_parallel_tool_use": False}, "auto", None),
    ],
)
def test_tool_choice(choice: Any, ours: str, parallel: bool | None) -> None:
    chat = ask(tools=[TOOL], tool_choice=choice).chat
    assert (chat.tool_choice, chat.parallel_tool_calls) == (ours, parallel)


def test_a_tool_by_name() -> None:
    choice = ask(tools=[TOOL], tool_choice={"type": "tool", "name": "weather"}).chat.tool_choice
    assert isinstance(choice, NamedChoice)
    assert choice.function is not None
    assert (choice.type, choice.function.name) == ("function", "weather")
    assert refused(tool_choice={"type": "some"}).param == "tool_choice.type"


LATER = TOOL | {"name": "later", "description": "Later.", "defer_loading": True}
REFERENCE = {"type": "tool_reference", "tool_name": "later"}
DEFINITION = {
    "type": "function",
    "function": {"name": "later", "description": "Later.", "parameters": {"type": "object"}},
}


def names(ours: Asked) -> list[tuple[str, bool | None]]:
    return [(tool.function.name, tool.defer_loading) for tool in ours.chat.tools or () if tool.function]


def test_a_deferred_tool_is_there_from_its_first_reference_on() -> None:
    searched = {"role": "assistant", "content": [use("a", "c1"), use("a", "c2")]}
    answers = {"role": "user", "content": [result("c1", [REFERENCE]), result("c2", [REFERENCE])]}
    assert names(ask(tools=[LATER, TOOL])) == [("weather", None)]
    ours = ask(USER, searched, answers, tools=[LATER, TOOL])
    assert names(ours) == [("weather", None), ("later", True)]
    assert ours.tools == (1, 0)
    assert json.loads(ours.chat.messages[2]["content"]) == DEFINITION
    assert ours.chat.messages[3]["content"] == "later"  # its definition was read before


def test_a_tool_that_must_be_called_is_not_deferred() -> None:
    ours = ask(tools=[TOOL, LATER], tool_choice={"type": "tool", "name": "later"})
    assert names(ours) == [("weather", None), ("later", None)]
    assert names(ask(tools=[LATER])) == [("later", None)]


def test_system_messages_add_tools_and_take_them_away() -> None:
    inline = {"type": "tool_definition", "definition": TOOL | {"name": "inline"}}
    blocks = [
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "later"}},
        {"type": "tool_addition", "tool": inline},
        {"type": "tool_addition", "tool": inline},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "weather"}},
    ]
    ours = ask(USER, {"role": "system", "content": blocks}, USER, tools=[TOOL, LATER])
    assert names(ours) == [("weather", None), ("later", True), ("inline", True)]
    assert ours.tools == (0, 1, -1)
    added, *_, removed = (part["text"] for part in ours.chat.messages[1]["content"])
    assert json.loads(added.partition(": ")[2]) == DEFINITION
    assert removed == "This tool can no longer be used: weather"
    told = ours.renamed(ApiError("tools[2].function.name: bad"))
    assert told.message == "tools[2].function.name: bad"
    bad = {"role": "system", "content": [{"type": "tool_addition", "tool": "later"}]}
    assert refused(USER, bad, tools=[TOOL]).param == "messages[1].content[0].tool"
