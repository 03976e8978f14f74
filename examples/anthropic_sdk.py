"""An agent session with a tool, through the anthropic SDK: python examples/anthropic_sdk.py [URL].

Start a server first (`make serve`). The call is forced by `tool_choice`, because the small model
would not make it by itself; what is inside is sampled under the tool's schema.
"""

from __future__ import annotations

import sys
from typing import Any

from anthropic import Anthropic, APIConnectionError

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome", "Lima"]}},
        "required": ["city"],
    },
}


def main() -> None:
    client = Anthropic(base_url=URL, api_key="none")
    asked: Any = {
        "model": client.models.list().data[0].id,
        "system": "You help travellers. " * 40,
        "tools": [WEATHER],
        "extra_body": {"temperature": 0},
    }
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
    count = client.messages.count_tokens(
        messages=messages, **{name: asked[name] for name in ("model", "system", "tools")}
    )
    print(f"prompt: {count.input_tokens} tokens")

    forced: Any = {"type": "tool", "name": "weather"}
    with client.messages.stream(messages=messages, tool_choice=forced, max_tokens=64, **asked) as stream:
        pieces = sum(event.type == "input_json" for event in stream)
        first = stream.get_final_message()
    call: Any = first.content[-1]
    print(f"call: {call.name}({call.input}), its input in {pieces} pieces")

    result = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": f"{call.input['city']}: sunny, 24 degrees",
    }
    messages += [first.to_param(), {"role": "user", "content": [result]}]
    second = client.messages.create(messages=messages, max_tokens=24, **asked)
    print(f"answer: {second.content[0].text if second.content[0].type == 'text' else second.content}")
    usage = second.usage
    print(f"resume: {usage.cache_read_input_tokens} tokens found, {usage.input_tokens} computed")


if __name__ == "__main__":
    try:
        main()
    except APIConnectionError:
        sys.exit(f"No server at {URL}: start one first (make serve), or name its URL.")
