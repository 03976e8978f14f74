"""From a turn's pieces to Anthropic's message: events of a stream, or the object they add up to. Pure.

Both are made by one fold, so they never disagree. One thing they tell differently: a call that was cut
can be streamed, as its text so far, but is no part of a whole message, where a call's input is an object.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from agentserve.messages import TurnUsage
from agentserve.server.http.anthropic.signature import sign
from agentserve.server.sessions.answer import CallDelta, Delta, Outcome
from agentserve.server.text_port import JsonObject
from agentserve.types import FinishReason

PING: JsonObject = {"type": "ping"}


@dataclass(frozen=True, slots=True)
class Asking:
    """What of the request the reply depends on."""

    id: str
    model: str
    prompt: int  # tokens
    shows_thinking: bool = True
    clamped: bool = False  # the answer may be shorter than its `max_tokens`: the context ends before


class Telling:
    """The events of one message. `begin`, then `push` for each delta, then `finish`."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking
        self._index = -1  # of the last block
        self._kind = ""  # of the block that is open
        self._call = -1  # whose arguments the open block takes
        self._thought: list[str] = []  # of the open block

    def begin(self) -> list[JsonObject]:
        """Of what was cached nothing is known yet; `finish` tells it."""
        message: JsonObject = {
            "id": self._asking.id,
            "type": "message",
            "role": "assistant",
            "model": self._asking.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
            "usage": _usage(self._asking.prompt, 0, 0, 0)
            | {
                "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
                "service_tier": "standard",
                "inference_geo": None,
            },
        }
        return [{"type": "message_start", "message": message}, PING]

    def push(self, delta: Delta) -> list[JsonObject]:
        return list(self._events(delta))

    def finish(self, outcome: Outcome) -> list[JsonObject]:
        reason, stop = stop_reason(outcome, clamped=self._asking.clamped)
        usage = _turn_usage(outcome.usage, outcome.reasoning_tokens)
        ended: JsonObject = {
            "stop_reason": reason,
            "stop_sequence": stop,
            "stop_details": None,
            "container": None,
        }
        return [
            *self._close(),
            {"type": "message_delta", "delta": ended, "usage": usage},
            {"type": "message_stop"},
        ]

    def _events(self, delta: Delta) -> Iterator[JsonObject]:
        """A delta says not in which order its parts came. What goes on with the open call did so first."""
        fresh: list[CallDelta] = []
        for call in delta.calls:
            if call.id is None and not fresh:
                yield from self._arguments(call)
            else:
                fresh.append(call)
        if delta.reasoning:
            yield from self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._thought.append(delta.reasoning)
            if self._asking.shows_thinking:
                yield self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.text:
            yield from self._open("text", {"type": "text", "text": "", "citations": None})
            yield self._delta({"type": "text_delta", "text": delta.text})
        for call in fresh:
            if call.id is not None:
                yield from self._close()
                self._call = call.index
                block: JsonObject = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
                yield from self._open("tool_use", block | {"caller": {"type": "direct"}})
            yield from self._arguments(call)

    def _arguments(self, call: CallDelta) -> Iterator[JsonObject]:
        if self._kind != "tool_use" or call.index != self._call:
            raise AssertionError("arguments of a call that is not the last one")
        if call.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _open(self, kind: str, block: JsonObject) -> Iterator[JsonObject]:
        if self._kind == kind:
            return
        yield from self._close()
        self._kind = kind
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> Iterator[JsonObject]:
        if not self._kind:
            return
        if self._kind == "thinking":
            signature = sign("".join(self._thought), shown=self._asking.shows_thinking)
            self._thought = []
            yield self._delta({"type": "signature_delta", "signature": signature})
        self._kind = ""
        yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, delta: JsonObject) -> JsonObject:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


_APPENDED = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}


def whole(events: Iterable[JsonObject], outcome: Outcome) -> JsonObject:
    """The message that a stream's events add up to, but for calls that are not whole."""
    message: JsonObject = {}
    blocks: list[JsonObject] = []
    grown: list[list[tuple[str, str]]] = []  # of each block: field, piece
    for event in events:
        match event["type"]:
            case "message_start":
                message = dict(event["message"])
            case "content_block_start":
                blocks.append(dict(event["content_block"]))
                grown.append([])
            case "content_block_delta":
                delta = event["delta"]
                name = _APPENDED[delta["type"]]
                grown[event["index"]].append((name, delta[name]))
            case "message_delta":
                message |= event["delta"]
                message["usage"] = message["usage"] | event["usage"]
    for block, pieces in zip(blocks, grown, strict=True):
        for name in {name: None for name, _ in pieces}:
            block[name] = "".join(piece for field, piece in pieces if field == name)
    complete = {call.id for call in outcome.calls if call.complete}
    message["content"] = [
        _with_input(block) for block in blocks if block["type"] != "tool_use" or block["id"] in complete
    ]
    return message


def _with_input(block: JsonObject) -> JsonObject:
    if block["type"] != "tool_use":
        return block
    text = block.pop("partial_json", "")
    return block | {"input": json.loads(text) if text.strip() else {}}


def stop_reason(outcome: Outcome, *, clamped: bool) -> tuple[str, str | None]:
    """Why it ended, and the stop sequence where that is why. Being cut wins, then calls."""
    if outcome.reason is FinishReason.LENGTH:
        return ("model_context_window_exceeded" if clamped else "max_tokens"), None
    if outcome.has_calls:
        return "tool_use", None
    if outcome.stop is not None:
        return "stop_sequence", outcome.stop
    return "end_turn", None


def _turn_usage(usage: TurnUsage, thinking_tokens: int) -> JsonObject:
    return _usage(usage.prompt, usage.cached, usage.generated, min(thinking_tokens, usage.generated))


def _usage(prompt: int, cached: int, generated: int, thinking: int) -> JsonObject:
    """`input_tokens` are those that were computed: with those read they are the prompt. All of it is kept,
    and nothing costs more for that, so nothing is told as written to a cache."""
    return {
        "input_tokens": prompt - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": generated,
        "output_tokens_details": {"thinking_tokens": thinking},
        "server_tool_use": None,
    }
