"""Which tools the model is offered, and where in the prompt it reads of them. Pure.

A tool with `defer_loading` is not among those at the prompt's beginning: the model reads its definition
where the conversation first refers to it (a tool search found it, or a system message adds it). So the
prompt only grows by it, and what was computed of it before stays good.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

import msgspec

from agentserve.server.errors import ApiError
from agentserve.server.http.anthropic.schemas import Tool
from agentserve.server.http.left_out import listed
from agentserve.server.http.schemas import FunctionDef, ToolDef

log = logging.getLogger(__name__)

_FROM_HERE = "This tool can be used from here on: "


class _Named(msgspec.Struct):
    """The tool of a tool_addition or tool_removal."""

    type: str = "tool_reference"
    name: str = ""
    definition: Tool | None = None


class Offered:
    """The tools of one request. A conversation is told from its beginning to its end."""

    def __init__(self, tools: Sequence[Tool], forced: str | None = None) -> None:
        """`forced`: a tool that must be called, and so must be known at once."""
        self._first: list[tuple[int, Tool]] = []
        self._later: dict[str, tuple[int, Tool]] = {}  # not yet referred to
        self._loaded: list[tuple[int, Tool]] = []
        left_out: list[str] = []
        for index, tool in enumerate(tools):
            if tool.input_schema is None:
                left_out.append(tool.type or "")
            elif tool.defer_loading and tool.name != forced and tool.name not in self._later:
                self._later[tool.name] = index, tool
            else:
                self._first.append((index, tool))
        if left_out:
            log.info("messages: tools were left out: %s", listed(left_out))
        if not self._first:  # somebody has to be the first
            self._first, self._later = list(self._later.values()), {}

    @property
    def tools(self) -> list[tuple[int, ToolDef]]:
        """Those that may be called, each with its index in the body (-1: it stood in a message)."""
        first = [(index, _function(tool)) for index, tool in self._first]
        return first + [(index, _function(tool, deferred=True)) for index, tool in self._loaded]

    def refer(self, name: str) -> str:
        """What the model reads at a reference: the definition, where it is the first one."""
        found = self._later.pop(name, None)
        if found is None:
            return name
        self._loaded.append(found)
        return _described(found[1])

    def add(self, raw: object, where: str) -> str:
        named = _named(raw, where)
        tool = named.definition
        if tool is None or tool.input_schema is None:
            return _FROM_HERE + self.refer(named.name or (tool.name if tool else ""))
        if tool.name not in (known.name for _, known in (*self._first, *self._loaded)):
            self._later.pop(tool.name, None)
            self._loaded.append((-1, tool))
        return _FROM_HERE + _described(tool)

    def remove(self, raw: object, where: str) -> str:
        return f"This tool can no longer be used: {_named(raw, where).name}"


def _named(raw: object, where: str) -> _Named:
    try:
        return msgspec.convert(raw, _Named)
    except msgspec.ValidationError as error:
        raise ApiError(f"{where}: {error}", param=where) from None


def _function(tool: Tool, *, deferred: bool = False) -> ToolDef:
    function = FunctionDef(tool.name, tool.description, tool.input_schema, tool.strict)
    return ToolDef("function", function, defer_loading=deferred or None)


def _described(tool: Tool) -> str:
    """As templates write a tool."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    told = {name: value for name, value in function.items() if value is not None}
    return json.dumps({"type": "function", "function": told}, ensure_ascii=False)
