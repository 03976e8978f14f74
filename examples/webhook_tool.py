"""A tool behind a webhook: python examples/webhook_tool.py [URL].

Start a server first that may call this machine: agentserve serve --allow-private-callbacks. The tool is an
HTTP endpoint; the server calls it, signed as Standard Webhooks are, whenever the model calls the tool. It
answers the first call at once, and the second one later, at the URL that came with it. The call is forced by
`tool_choice` (a field of ours), because the small model would not make it by itself.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any
from urllib.parse import urljoin

import httpx
import uvicorn
from openai import APIConnectionError, OpenAI
from standardwebhooks import Webhook, WebhookVerificationError
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

WEATHER: dict[str, Any] = {
    "type": "webhook",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome", "Lima"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
    "timeout": 60,
}
URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"


class Receiver:
    """The tool. A call may come more than once, always under the same `webhook-id`: its effect is one."""

    def __init__(self) -> None:
        self.secret = ""
        self.done: dict[str, str] = {}
        self.app = Starlette(routes=[Route("/weather", self.weather, methods=["POST"])])

    async def weather(self, request: Request) -> Response:
        try:
            event = Webhook(self.secret).verify(await request.body(), dict(request.headers))
        except WebhookVerificationError:
            return Response(status_code=401)
        action = event["data"]["required_action"]
        later = bool(self.done)
        if event["id"] not in self.done:
            self.done[event["id"]] = f"{action['arguments']['city']}: sunny, 24 degrees"
            print(f"call: weather({action['arguments']['city']}), {'later' if later else 'at once'}")
        result = {"output": self.done[event["id"]]}
        if later:
            task = BackgroundTask(post, urljoin(URL, action["callback_url"]), result)
            return Response(status_code=202, background=task)
        return JSONResponse(result)


async def post(url: str, result: dict[str, Any]) -> None:
    """No key is needed: the URL is for this one result."""
    async with httpx.AsyncClient() as client:
        reply = await client.post(url, json=result)
    print(f"posted: {reply.status_code}")


def main() -> None:
    receiver = Receiver()
    server = uvicorn.Server(uvicorn.Config(receiver.app, host="127.0.0.1", port=0, log_level="warning"))
    serving = threading.Thread(target=server.run)
    serving.start()
    while not server.started:
        time.sleep(0.01)
    try:
        ask(receiver, server.servers[0].sockets[0].getsockname()[1])
    finally:
        server.should_exit = True
        serving.join()


def ask(receiver: Receiver, port: int) -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key="none")
    endpoint = client.webhooks.create(
        name="weather",
        url=f"http://127.0.0.1:{port}/weather",
        event_types=["agent.session.action_required"],
        extra_body={"payload": "full"},  # the call itself, not only that there is one
    )
    receiver.secret = endpoint.signing_secret
    agent: Any = {
        "model": client.models.list().data[0].id,
        "instructions": "You help travellers.",
        "tools": [{**WEATHER, "webhook": endpoint.id}],
        "temperature": 0,
        "max_output_tokens": 48,
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    }
    sessions = client.beta.agents.sessions
    for question in ("What is the weather in Rome?", "What is the weather in Oslo?"):
        session = sessions.create(environment={"type": "none"}, agent=agent, input=question)
        while sessions.retrieve(session.id).status != "idle":
            time.sleep(0.05)  # an application would follow the events
        for item in sessions.items.list(session.id, order="asc"):
            if item.type == "function_call_output":
                print(f"result: {item.output}")
    client.webhooks.delete(endpoint.id)


if __name__ == "__main__":
    try:
        main()
    except APIConnectionError:
        sys.exit(f"No server at {URL}: start one first, or name its URL.")
