"""The Responses API through the openai SDK: python examples/openai_responses.py [URL].

Start a server first (`make serve`). A streamed tool call and its result, where the client sends only what
is new: the server has the rest by `previous_response_id`. Then a response that is made in the background.
The call is forced by `tool_choice`, because the small model would not make it by itself.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from openai import APIConnectionError, OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
TOOLS: list[Any] = [
    {
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
]


def main() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key="none")
    model = client.models.list().data[0].id
    fields: dict[str, Any] = {
        "model": model,
        "instructions": "You help travellers. " * 40,
        "tools": TOOLS,
        "temperature": 0,
    }
    forced: Any = {"type": "function", "name": "weather"}
    with client.responses.stream(
        input="What is the weather in Rome?", tool_choice=forced, max_output_tokens=64, **fields
    ) as stream:
        for event in stream:
            if event.type == "response.function_call_arguments.done":
                print(f"call: {event.name}({event.arguments})")
        first = stream.get_final_response()
    call: Any = first.output[-1]

    # While the tool runs, nothing need be sent again: its result alone goes on from the response.
    city = json.loads(call.arguments)["city"]
    result: Any = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": f"{city}: sunny, 24 degrees",
    }
    second = client.responses.create(
        input=[result], previous_response_id=first.id, max_output_tokens=24, **fields
    )
    usage = second.usage
    assert usage is not None
    print(f"answer: {second.output_text}")
    cached = usage.input_tokens_details.cached_tokens
    print(f"resume: {usage.input_tokens} input tokens, {cached} cached")

    later = client.responses.create(
        input="And in one word?",
        previous_response_id=second.id,
        background=True,
        max_output_tokens=8,
        **fields,
    )
    while later.status in ("queued", "in_progress"):
        time.sleep(0.2)
        later = client.responses.retrieve(later.id)
    print(f"background: {later.status}, {later.output_text}")


if __name__ == "__main__":
    try:
        main()
    except APIConnectionError:
        sys.exit(f"No server at {URL}: start one first (make serve), or name its URL.")
