"""An agent session with a tool, through the openai SDK: python examples/tool_session.py [URL].

Start a server first (`make serve`). The call is forced by `tool_choice`, because the small model
would not make it by itself; what is inside is sampled under the tool's schema.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from openai import APIConnectionError, OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome", "Lima"]}},
                "required": ["city"],
            },
        },
    }
]


def main() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key="none")
    model = client.models.list().data[0].id
    messages: list[Any] = [
        {"role": "system", "content": "You help travellers. " * 40},
        {"role": "user", "content": "What is the weather in Rome?"},
    ]
    forced: Any = {"type": "function", "function": {"name": "weather"}}
    first = client.chat.completions.create(
        model=model, messages=messages, tools=TOOLS, tool_choice=forced, temperature=0, max_tokens=64
    )
    message = first.choices[0].message
    assert message.tool_calls
    call: Any = message.tool_calls[0]
    print(f"call: {call.function.name}({call.function.arguments})")

    city = json.loads(call.function.arguments)["city"]
    result = {"role": "tool", "tool_call_id": call.id, "content": f"{city}: sunny, 24 degrees"}
    second = client.chat.completions.create(
        model=model, messages=[*messages, message, result], tools=TOOLS, temperature=0, max_tokens=24
    )
    usage = second.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    print(f"answer: {second.choices[0].message.content}")
    print(f"resume: {usage.prompt_tokens} prompt tokens, {usage.prompt_tokens_details.cached_tokens} cached")


if __name__ == "__main__":
    try:
        main()
    except APIConnectionError:
        sys.exit(f"No server at {URL}: start one first (make serve), or name its URL.")
