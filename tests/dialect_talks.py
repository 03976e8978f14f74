"""A conversation with a real server in each dialect, told alike whichever it is, streamed and whole."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

from tests.anthropic_client import frames, put_together
from tests.responses_rig import checked, parsed

MODEL = "thinker"
TOKENS = 200  # more than anything here says
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


class Said(NamedTuple):
    thought: str
    text: str
    calls: list[tuple[str, Any]]  # id, arguments
    prompt: int
    cached: int
    generated: int
    reasoning: int  # tokens
    session: str


@dataclass
class Chat:
    """A conversation by chat completions."""

    client: httpx.Client
    stream: bool
    told: bool = True  # reasoning is sent back
    history: list[Any] = field(default_factory=list)

    def ask(self, text: str, **fields: Any) -> Said:
        self.history.append({"role": "user", "content": text})
        return self._turn(fields)

    def answer(self, call: str, result: str, **fields: Any) -> Said:
        self.history.append({"role": "tool", "tool_call_id": call, "content": result})
        return self._turn(fields)

    def budget(self, tokens: int) -> dict[str, Any]:
        return {"thinking_token_budget": tokens}

    def off(self) -> dict[str, Any]:
        return {"reasoning_effort": "none"}

    def tool(self, *, forced: bool) -> dict[str, Any]:
        function = {"name": "weather", "parameters": CITY, "strict": True}
        choice = {"type": "function", "function": {"name": "weather"}}
        return {"tools": [{"type": "function", "function": function}]} | (
            {"tool_choice": choice} if forced else {}
        )

    def _turn(self, fields: dict[str, Any]) -> Said:
        body = {"model": MODEL, "messages": self.history, "max_tokens": TOKENS, "stream": self.stream}
        options = {"stream_options": {"include_usage": True}} if self.stream else {}
        reply = self.client.post("/v1/chat/completions", json=body | options | fields)
        assert reply.status_code == 200, reply.text
        message, usage = self._streamed(reply.text) if self.stream else self._whole(reply.json())
        self.history.append(message if self.told else without(message, "reasoning", "reasoning_content"))
        return Said(
            message.get("reasoning_content", ""),
            message["content"] or "",
            [
                (call["id"], json.loads(call["function"]["arguments"]))
                for call in message.get("tool_calls", ())
            ],
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["completion_tokens"],
            usage["completion_tokens_details"]["reasoning_tokens"],
            reply.headers["x-session-id"],
        )

    @staticmethod
    def _whole(reply: Any) -> tuple[Any, Any]:
        return reply["choices"][0]["message"], reply["usage"]

    @staticmethod
    def _streamed(text: str) -> tuple[Any, Any]:
        *chunks, last, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert done == "[DONE]"
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        for chunk in map(json.loads, chunks):
            delta = chunk["choices"][0]["delta"]
            assert delta.get("reasoning") == delta.get("reasoning_content")
            if delta.get("reasoning"):
                assert not message["content"]
                assert "tool_calls" not in message
                for name in ("reasoning", "reasoning_content"):
                    message[name] = message.get(name, "") + delta[name]
            message["content"] += delta.get("content") or ""
            for piece in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if "id" in piece:
                    calls.append(without(piece, "index"))
                else:
                    calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
        return message, json.loads(last)["usage"]


@dataclass
class Messages:
    """A conversation by Anthropic's dialect."""

    client: httpx.Client
    stream: bool
    told: bool = True
    history: list[Any] = field(default_factory=list)

    def ask(self, text: str, **fields: Any) -> Said:
        self.history.append({"role": "user", "content": text})
        return self._turn(fields)

    def answer(self, call: str, result: str, **fields: Any) -> Said:
        block = {"type": "tool_result", "tool_use_id": call, "content": result}
        self.history.append({"role": "user", "content": [block]})
        return self._turn(fields)

    def budget(self, tokens: int) -> dict[str, Any]:
        return {"thinking": {"type": "enabled", "budget_tokens": tokens}}

    def off(self) -> dict[str, Any]:
        return {"thinking": {"type": "disabled"}}

    def tool(self, *, forced: bool) -> dict[str, Any]:
        tool = {"name": "weather", "input_schema": CITY, "strict": True}
        return {"tools": [tool]} | ({"tool_choice": {"type": "tool", "name": "weather"}} if forced else {})

    def _turn(self, fields: dict[str, Any]) -> Said:
        body = {"model": MODEL, "messages": self.history, "max_tokens": TOKENS, "stream": self.stream}
        reply = self.client.post("/v1/messages", json=body | fields)
        assert reply.status_code == 200, reply.text
        message = put_together(frames(reply.content)) if self.stream else reply.json()
        blocks = [
            without(block, "partial") | {"input": json.loads(block["partial"])}
            if "partial" in block
            else block
            for block in message["content"]
        ]
        kinds = [block["type"] for block in blocks]
        assert "thinking" not in kinds[1:]
        sent_back = [block for block in blocks if self.told or block["type"] != "thinking"]
        self.history.append({"role": "assistant", "content": sent_back})
        usage = message["usage"]
        return Said(
            "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
            "".join(block["text"] for block in blocks if block["type"] == "text"),
            [(block["id"], block["input"]) for block in blocks if block["type"] == "tool_use"],
            usage["input_tokens"] + usage["cache_read_input_tokens"],
            usage["cache_read_input_tokens"],
            usage["output_tokens"],
            usage["output_tokens_details"]["thinking_tokens"],
            reply.headers["x-session-id"],
        )


@dataclass
class Responses:
    """A conversation by items. `told`: all of them are sent each time, reasoning packed; else the last
    response is named."""

    client: httpx.Client
    stream: bool
    told: bool = True
    history: list[Any] = field(default_factory=list)
    last: str | None = None

    def ask(self, text: str, **fields: Any) -> Said:
        return self._turn({"role": "user", "content": text}, fields)

    def answer(self, call: str, result: str, **fields: Any) -> Said:
        return self._turn({"type": "function_call_output", "call_id": call, "output": result}, fields)

    def budget(self, tokens: int) -> dict[str, Any]:
        return {"thinking_token_budget": tokens}

    def off(self) -> dict[str, Any]:
        return {"reasoning": {"effort": "none"}}

    def tool(self, *, forced: bool) -> dict[str, Any]:
        tool = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}
        choice = {"type": "function", "name": "weather"}
        return {"tools": [tool]} | ({"tool_choice": choice} if forced else {})

    def _turn(self, item: Any, fields: dict[str, Any]) -> Said:
        self.history.append(item)
        body = {"model": MODEL, "max_output_tokens": TOKENS, "stream": self.stream}
        if self.told:
            body |= {"input": self.history, "store": False, "include": ["reasoning.encrypted_content"]}
        else:
            body |= {"input": [item], "previous_response_id": self.last}
        reply = self.client.post("/v1/responses", json=body | fields)
        assert reply.status_code == 200, reply.text
        made = checked(parsed(reply.content)) if self.stream else reply.json()
        output = made["output"]
        assert "reasoning" not in [item["type"] for item in output][1:]
        assert made["status"] == "completed"
        self.last = made["id"]
        self.history += [without(item, "content") if item["type"] == "reasoning" else item for item in output]
        usage = made["usage"]
        return Said(
            "".join(p["text"] for item in output if item["type"] == "reasoning" for p in item["content"]),
            "".join(p["text"] for item in output if item["type"] == "message" for p in item["content"]),
            [
                (item["call_id"], json.loads(item["arguments"]))
                for item in output
                if item["type"] == "function_call"
            ],
            usage["input_tokens"],
            usage["input_tokens_details"]["cached_tokens"],
            usage["output_tokens"],
            usage["output_tokens_details"]["reasoning_tokens"],
            made["session_id"],
        )


Dialect = type[Chat] | type[Messages] | type[Responses]


def without(message: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name not in names}
