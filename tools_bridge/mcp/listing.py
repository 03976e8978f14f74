"""What is taken of a server's listing: sorted and bounded, for prompts begin with it. Pure."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from tools_bridge.mcp.types import ListedTool

MOST_TOOLS = 128  # of one server
MOST_NAME = 128
MOST_DESCRIPTION = 4096  # characters; the rest is cut off
MOST_SCHEMA = 32 << 10  # characters
MOST_DEPTH = 32
MOST_ALL = 256 << 10  # characters of all tools together

_ODD = re.compile(r"[^a-zA-Z0-9_.-]")


def taken(
    tools: Iterable[ListedTool], allowed: Collection[str] | None = None
) -> tuple[list[ListedTool], int]:
    """The tools that a session gets, by name; how many were left out because they are too large or too many.
    `allowed`: those that are wanted; None: all."""
    wanted = [tool for tool in tools if allowed is None or tool.name in allowed]
    found: dict[str, ListedTool] = {}
    left_out = room = 0
    for tool in sorted(wanted, key=lambda tool: tool.name):
        size = _size(tool)
        if tool.name in found or size is None or len(found) >= MOST_TOOLS or room + size > MOST_ALL:
            left_out += 1
            continue
        room += size
        found[tool.name] = ListedTool(tool.name, tool.description[:MOST_DESCRIPTION], tool.parameters)
    return list(found.values()), left_out


def _size(tool: ListedTool) -> int | None:
    """Characters; None: it is too large."""
    if not 0 < len(tool.name) <= MOST_NAME or not _shallow(tool.parameters, MOST_DEPTH):
        return None
    try:
        schema = len(json.dumps(tool.parameters, allow_nan=False))
    except ValueError:  # numbers that are no JSON, or have too many digits
        return None
    return (
        None
        if schema > MOST_SCHEMA
        else schema + len(tool.name) + min(len(tool.description), MOST_DESCRIPTION)
    )


def _shallow(value: object, depth: int) -> bool:
    if isinstance(value, dict):
        return depth > 0 and all(_shallow(part, depth - 1) for part in value.values())
    if isinstance(value, list):
        return depth > 0 and all(_shallow(part, depth - 1) for part in value)
    return True


def called(
    listings: Sequence[tuple[str, Sequence[str]]], names: Collection[str]
) -> dict[tuple[str, str], str]:
    """What the model calls the tools of several servers (label, names), by label and name: as their server
    does, with its label before it where that is no name of one tool alone. `names` are taken already."""
    plain = [(label, name, _ODD.sub("_", name)) for label, tools in listings for name in tools]
    count = Counter(shown for _, _, shown in plain)
    used = set(names)
    found: dict[tuple[str, str], str] = {}
    for label, name, shown in plain:
        wanted = shown
        if shown in names or count[shown] > 1:
            wanted = f"{label}_{shown}"[:MOST_NAME]
        number = 1
        while wanted in used:
            number += 1
            wanted = f"{label}_{shown}"[: MOST_NAME - 4] + f"_{number}"
        used.add(wanted)
        found[label, name] = wanted
    return found
