"""MCP servers for tests: one that is scripted, one made with the `mcp` package, in its own process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from subprocess import PIPE, Popen
from typing import Any

import pytest

from tools_bridge.mcp.types import Answer, ListedTool, Place
from tools_bridge.webhooks.address import AddressPolicy, parse

needs_mcp = pytest.mark.skipif(
    find_spec("mcp") is None, reason="mcp is not installed: the extras `mcp` and `dev` have it"
)
URL = "https://tools.example.com/mcp"
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD = ListedTool("add", "Adds numbers.", NUMBERS)
SUB = ListedTool("sub", "Subtracts.", NUMBERS)


def server(**fields: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": "calc", "server_url": URL, "require_approval": "never", **fields}


class FakeMcp:
    """An `Mcp` whose tools and answers are set by tests. What is in `raises` is raised."""

    def __init__(self, *tools: ListedTool) -> None:
        self.tools: dict[str, list[ListedTool]] = {}
        self.default = list(tools)
        self.raises: Exception | None = None
        self.answer: Answer | Exception | Callable[[], Any] = Answer("3")
        self.places: list[Place] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.seconds = 0.0  # of the last call

    def check(self, url: str) -> None:
        parse(url, AddressPolicy())

    async def list_tools(self, place: Place, seconds: float) -> list[ListedTool]:
        self.places.append(place)
        await asyncio.sleep(0)
        if self.raises is not None:
            raise self.raises
        return list(self.tools.get(place.url, self.default))

    async def call(self, place: Place, tool: str, arguments: dict[str, Any], seconds: float) -> Answer:
        self.places.append(place)
        self.calls.append((tool, arguments))
        self.seconds = seconds
        answer = self.answer() if callable(self.answer) else self.answer
        if asyncio.iscoroutine(answer):
            answer = await answer
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, Answer)
        return answer


@contextmanager
def real_server() -> Iterator[str]:
    """The URL of a server in a process of its own."""
    process = Popen([sys.executable, "-m", "tests.mcp_server"], stdout=PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()
