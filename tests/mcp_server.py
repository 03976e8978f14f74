"""A real MCP server: `python -m tests.mcp_server` says its URL and serves until it is killed."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import uvicorn
from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("calc")
told: list[str] = []


@server.tool()
def add(a: int, b: int) -> int:
    """Adds numbers."""
    return a + b


@server.tool()
def table() -> dict[str, Any]:
    """Numbers with names."""
    return {"one": 1, "deux": "é"}


@server.tool()
def picture() -> Image:
    """A picture."""
    return Image(data=b"\x89PNG", format="png")


@server.tool()
def broken() -> str:
    """Fails."""
    raise ValueError("there is no such thing")


@server.tool()
def large(count: int) -> str:
    """Says much."""
    return "x" * count


@server.tool()
async def slow(name: str) -> str:
    """Takes its time."""
    told.append(f"{name} began")
    try:
        await asyncio.sleep(30)
    finally:
        told.append(f"{name} ended")
    return name


@server.tool()
def tell() -> list[str]:
    """What became of calls of `slow`."""
    return told


@server.tool()
def leave() -> str:
    """Ends its server in mid-call."""
    os._exit(1)


async def main() -> None:
    runner = uvicorn.Server(uvicorn.Config(server.streamable_http_app(), port=0, log_level="critical"))
    serving = asyncio.create_task(runner.serve())
    while not runner.started:  # noqa: ASYNC110 (uvicorn tells nobody)
        await asyncio.sleep(0.005)
    port = runner.servers[0].sockets[0].getsockname()[1]
    print(f"http://127.0.0.1:{port}/mcp", flush=True)
    await serving


if __name__ == "__main__":
    asyncio.run(main())
