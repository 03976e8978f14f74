"""Tools of an MCP server, run by AgentServe: python examples/mcp_tool.py [URL].

Start a server first that may dial this machine: `agentserve serve --private-host 127.0.0.1`. This script
serves an MCP server of one tool, gives it to an agent, approves the call that the agent makes, and prints
what came of it; then a response has the same tool, without being asked. Calls are forced by `tool_choice`,
because the small model would not make them by itself.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import uvicorn
from mcp.server.mcpserver import MCPServer
from openai import APIConnectionError, OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
station = MCPServer("station")


@station.tool()
def departures(city: str) -> str:
    """The next trains from a city's main station."""
    return f"{city}: 12:10 to the airport, 12:25 to the harbour"


def serve() -> str:
    """The URL of the MCP server, which runs beside this script."""
    server = uvicorn.Server(uvicorn.Config(station.streamable_http_app(), port=0, log_level="warning"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    return f"http://127.0.0.1:{port}/mcp"


def main() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key="none")
    model, station = client.models.list().data[0].id, serve()
    in_a_session(client, model, station)
    in_a_response(client, model, station)


def in_a_session(client: OpenAI, model: str, station: str) -> None:
    sessions = client.beta.agents.sessions
    agent: Any = {
        "model": model,
        "instructions": "You help travellers. ",
        "tools": [
            {
                "type": "mcp",
                "server_label": "station",
                "transport": {"type": "http", "server_url": station},
                "require_approval": "always",  # the default
            }
        ],
        "temperature": 0,
        "max_output_tokens": 48,
        "tool_choice": {"type": "function", "function": {"name": "departures"}},
    }
    session = sessions.create(environment={"type": "none"}, agent=agent, input="Which trains leave Oslo?")
    session = wait(client, session.id)
    for action in session.required_actions:
        print(f"approve: {action.request.server_label}.{action.request.name}({action.request.arguments})")
        decision: Any = {
            "type": "agent.session.input.mcp_approval_request_result",
            "request_id": action.request_id,
            "response": {"type": "mcp_tool_call", "decision": "approve"},
        }
        sessions.events.create(session.id, events=[decision])
    wait(client, session.id, "idle")
    for item in sessions.items.list(session.id, order="asc"):
        if item.type == "mcp_call":
            print(f"result: {item.status}: {item.output or item.error}")
        elif item.type == "message" and item.role == "assistant":
            print(f"answer: {item.content[0].text}")
    sessions.delete(session.id)


def in_a_response(client: OpenAI, model: str, station: str) -> None:
    tool: Any = {"type": "mcp", "server_label": "station", "server_url": station, "require_approval": "never"}
    response = client.responses.create(
        model=model,
        input="Which trains leave Rome?",
        tools=[tool],
        tool_choice={"type": "mcp", "server_label": "station", "name": "departures"},
        temperature=0,
        max_output_tokens=96,
    )
    for item in response.output:
        if item.type == "mcp_call":
            print(f"in a response: {item.name}({item.arguments}): {item.status}: {item.output}")


def wait(client: OpenAI, session: str, *statuses: str) -> Any:
    """An application would follow the events."""
    while True:
        found = client.beta.agents.sessions.retrieve(session)
        if found.status in (statuses or ("idle", "requires_action")):
            return found
        time.sleep(0.1)


if __name__ == "__main__":
    try:
        main()
    except APIConnectionError:
        sys.exit(f"No server at {URL}: start one first, or name its URL.")
