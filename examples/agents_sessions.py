"""The Agents API through the openai SDK: python examples/agents_sessions.py [URL].

Start a server first (`make serve`). The server keeps the session and runs its turns: the client sends a
message, runs the tool that the model calls, and reads events. Then a second turn, the items, and a cancel.
The call is forced by `tool_choice` (a field of ours), because the small model would not make it by itself.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from openai import APIConnectionError, OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome", "Lima"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


def weather(arguments: dict[str, Any]) -> str:
    print(f"call: weather({arguments['city']})")
    return f"{arguments['city']}: sunny, 24 degrees"


def main() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key="none")
    sessions = client.beta.agents.sessions
    agent: Any = {
        "model": client.models.list().data[0].id,
        "instructions": "You help travellers. " * 40,
        "tools": [WEATHER],
        "temperature": 0,
        "max_output_tokens": 64,
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    }
    session = sessions.create(environment={"type": "none"}, agent=agent)
    with sessions.stream(
        session.id, input="What is the weather in Rome?", tool_handlers={"weather": weather}
    ) as stream:
        for event in stream:
            if event.type == "agent.session.turn.output_text.done":
                print(f"answer: {event.text}")
    usage = sessions.retrieve(session.id).usage
    assert usage is not None
    print(f"tokens: {usage.input_tokens} in, {usage.input_tokens_details.cached_tokens} of them cached")

    sessions.events.create(
        session.id,
        events=[
            {
                "type": "agent.session.input.message",
                "input": [{"role": "user", "content": [{"type": "input_text", "text": "And in Oslo?"}]}],
            }
        ],
    )
    while sessions.retrieve(session.id).status == "in_progress":
        time.sleep(0.1)  # an application would follow the events
    sessions.events.create(session.id, events=[{"type": "agent.session.input.cancel"}])
    print("turns:", ", ".join(turn.status for turn in sessions.turns.list(session.id, order="asc")))
    print("items:", ", ".join(item.type for item in sessions.items.list(session.id, order="asc")))
    sessions.delete(session.id)


if __name__ == "__main__":
    try:
        main()
    except APIConnectionError:
        sys.exit(f"No server at {URL}: start one first (make serve), or name its URL.")
