"""Which tools an answer may or must call: OpenAI's `tool_choice`, checked against the tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentserve.server.errors import ApiError
from agentserve.server.http.schemas import AllowedTools, NamedChoice
from agentserve.server.text_port import JsonObject


@dataclass(frozen=True, slots=True)
class Choice:
    mode: str  # none | auto | required | named
    named: str | None = None
    allowed: tuple[str, ...] = ()  # these alone; empty: all tools


NOT_OFFERED = "tool_not_offered"


def not_offered(kinds: Sequence[str]) -> str:
    """What to say behind an error of that code where tools of such kinds were left out."""
    if not kinds:
        return ""
    named = ", ".join(repr(kind[:40]) for kind in sorted(set(kinds))[:8])
    return f"; tools of type {named} were left out, this server does not run them"


def tool_choice(
    wanted: str | NamedChoice | None, tools: Sequence[JsonObject], left_out: Sequence[str] = ()
) -> Choice:
    """What `wanted` comes to; something else than a choice among `tools` is a 400. `left_out`: the kinds of
    those that are not among them."""
    try:
        return _choice(wanted, tools)
    except ApiError as error:
        if error.code != NOT_OFFERED:
            raise
        raise ApiError(error.message + not_offered(left_out), param=error.param, code=error.code) from None


def _choice(wanted: str | NamedChoice | None, tools: Sequence[JsonObject]) -> Choice:
    if wanted is None:
        return Choice("auto" if tools else "none")
    if isinstance(wanted, str):
        return _mode(wanted, tools)
    if wanted.type == "allowed_tools":
        return _allowed(wanted.allowed_tools, tools)
    if wanted.type != "function" or wanted.function is None:
        raise ApiError(
            f"tool_choice: type {wanted.type!r} is not supported, only 'function' with a name "
            "and 'allowed_tools'",
            param="tool_choice",
        )
    return Choice("named", _known(wanted.function.name, tools))


def _mode(mode: str, tools: Sequence[JsonObject]) -> Choice:
    if mode == "any":
        mode = "required"
    if mode not in ("none", "auto", "required"):
        raise ApiError(
            f"tool_choice: {mode!r} is not one of none, auto, required, or a named function",
            param="tool_choice",
        )
    if mode == "required" and not tools:
        raise ApiError("tool_choice: 'required' needs tools", param="tool_choice", code=NOT_OFFERED)
    return Choice(mode if tools else "none")


def _allowed(wanted: AllowedTools | None, tools: Sequence[JsonObject]) -> Choice:
    """The prompt shows all tools, so that the prefix stays; the grammar lets through these."""
    if wanted is None or wanted.mode not in ("auto", "required"):
        raise ApiError(
            "tool_choice: allowed_tools needs a mode, 'auto' or 'required', and tools", param="tool_choice"
        )
    names: list[str] = []
    for tool in wanted.tools:
        if tool.type != "function":
            continue  # of a kind that is not offered either
        name = tool.function.name if tool.function is not None else tool.name
        names.append(_known(name or "", tools))
    if not names:
        if wanted.mode == "required":
            raise ApiError("tool_choice: 'required' needs allowed tools", param="tool_choice")
        return Choice("none")
    return Choice(wanted.mode, allowed=tuple(dict.fromkeys(names)))


def _known(name: str, tools: Sequence[JsonObject]) -> str:
    if name not in (tool["function"]["name"] for tool in tools):
        raise ApiError(f"tool_choice: {name!r} is not among the tools", param="tool_choice", code=NOT_OFFERED)
    return name
