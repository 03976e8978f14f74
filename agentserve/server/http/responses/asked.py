"""From items to the chat turn that they ask for. Pure.

What the model says in one turn comes as several items (reasoning, text, calls), and is one message of the
history: with the same text and calls in the same order as it was said, so that its ids are found again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from agentserve.server.agents.texts import NO_RESULT
from agentserve.server.errors import ApiError
from agentserve.server.http.responses import mcp_items
from agentserve.server.http.responses.schemas import ResponsesRequest, TextFormat
from agentserve.server.http.responses.thoughts import Room, unpacked
from agentserve.server.http.responses.tools import Toolbox, flat_name
from agentserve.server.http.schemas import ChatRequest, JsonSchemaFormat, NamedChoice, ResponseFormat
from agentserve.server.limits import INT64_MAX
from agentserve.server.text_port import JsonObject

_CALLS = ("function_call", mcp_items.CALL, mcp_items.REQUEST)


@dataclass(slots=True)
class _Said:
    """What the assistant said in one turn, as far as it has been read."""

    texts: list[str] = field(default_factory=list)
    calls: list[JsonObject] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    results: list[JsonObject] = field(default_factory=list)  # of calls that this server made
    step: str | None = None  # of its calls, where they were about MCP servers' tools

    def __bool__(self) -> bool:
        return bool(self.texts or self.calls or self.thoughts)

    def message(self) -> JsonObject:
        text = "".join(self.texts)
        message: JsonObject = {"role": "assistant", "content": text or (None if self.calls else "")}
        if self.calls:
            message["tool_calls"] = self.calls
        if self.thoughts:
            message["reasoning_content"] = "".join(self.thoughts)
        return message


def messages_of(
    runs: Sequence[Sequence[JsonObject]], room: Room | None = None, names: mcp_items.Names | None = None
) -> tuple[list[JsonObject], list[int]]:
    """The chat messages of items, and for each the place of its first item, counted over all runs.

    A run is one response's input, or its output: what is said in two of them is never one message.
    `room`: for the reasoning that is packed in them.
    """
    made = {item.get("approval_request_id") for run in runs for item in run if item["type"] == mcp_items.CALL}
    said = mcp_items.answers(item for run in runs for item in run)
    reader = _Reader(room, names or {}, made, said)
    place = 0
    for run in runs:
        for item in run:
            reader.take(item, place)
            place += 1
        reader.flush()
    return _behind_their_calls(reader.messages, reader.places)


def _behind_their_calls(
    messages: Sequence[JsonObject], places: Sequence[int]
) -> tuple[list[JsonObject], list[int]]:
    """Results right behind the message whose calls they answer, however late they came: items that are kept
    cannot be put into another order by who sends the result."""
    blocks: list[list[tuple[JsonObject, int]]] = []
    owner: dict[str, int] = {}
    for message, place in zip(messages, places, strict=True):
        at = owner.get(message["tool_call_id"]) if message["role"] == "tool" else None
        if at is not None:
            blocks[at].append((message, place))
            continue
        owner |= dict.fromkeys((call["id"] for call in message.get("tool_calls", ())), len(blocks))
        blocks.append([(message, place)])
    placed = [entry for block in blocks for entry in block]
    return [message for message, _ in placed], [place for _, place in placed]


class _Reader:
    def __init__(
        self,
        room: Room | None,
        names: mcp_items.Names,
        made: Collection[str | None],
        decisions: Mapping[str, JsonObject],
    ) -> None:
        """`made`: requests for approval whose calls were made; `decisions`: what was said to them."""
        self.messages: list[JsonObject] = []
        self.places: list[int] = []
        self._room = room
        self._names = names
        self._made = made
        self._decisions = decisions
        self._said = _Said()
        self._since = 0

    def take(self, item: JsonObject, place: int) -> None:
        kind = item["type"]
        if kind in (mcp_items.LISTING, mcp_items.RESPONSE):
            self.flush()  # where one of them stands, another response begins
            return
        if kind == mcp_items.CALL and item["approval_request_id"] is not None:  # asked for before
            self.flush()
            self._results(_results_of(item), place)
        elif kind == "function_call_output":
            self.flush()
            self._add(_result(item), place)
        elif kind == "message" and item["role"] != "assistant":
            self.flush()
            self._add({"role": item["role"], "content": _text_parts(item["content"])}, place)
        else:
            self._say(item, place)

    def flush(self) -> None:
        said = self._said
        if said:
            self._said = _Said()
            self._add(said.message(), self._since)
            self._results(said.results, self._since)

    def _results(self, results: Sequence[JsonObject], place: int) -> None:
        for result in results:
            self._add(result, place)

    def _add(self, message: JsonObject, place: int) -> None:
        self.messages.append(message)
        self.places.append(place)

    def _say(self, item: JsonObject, place: int) -> None:
        said = self._said
        # Nothing can come between calls and their results, so what follows a call goes with it: unless
        # this server made the call, for then the model goes on.
        calls = item["type"] in _CALLS
        over = said.step is not None and not (calls and mcp_items.step_of(item) == said.step)
        if over or (not calls and said.texts and not said.calls):
            self.flush()
            said = self._said
        if not said:
            self._since = place
        if item["type"] == "message":
            said.texts.append("".join(_part_text(part) for part in item["content"]))
        elif item["type"] == "reasoning":
            said.thoughts += _thoughts(item, self._room)
        elif item["type"] == "function_call":
            said.calls.append(_call(item))
        else:
            said.calls.append(mcp_items.chat_call(item, self._names))
            said.step = mcp_items.step_of(item)
            if item["type"] == mcp_items.CALL:
                said.results += _results_of(item)
            elif item["id"] not in self._made:
                said.results.append(_tool(item, self._instead(item["id"])))

    def _instead(self, request: str) -> str:
        """What is read of a call that was asked for and not made."""
        decision = self._decisions.get(request)
        if decision is None or decision["approve"]:
            return mcp_items.UNDECIDED
        return f"{mcp_items.DENIED} {decision['reason'] or ''}".rstrip()


def _results_of(item: JsonObject) -> list[JsonObject]:
    result = mcp_items.result_of(item, NO_RESULT)
    return [] if result is None else [_tool(item, result)]


def _tool(item: JsonObject, content: str) -> JsonObject:
    return {"role": "tool", "tool_call_id": mcp_items.call_id(item), "content": content}


def _call(item: JsonObject) -> JsonObject:
    name = item["name"]
    if "namespace" in item:
        name = flat_name(item["namespace"], name)
    return {
        "id": item["call_id"],
        "type": "function",
        "function": {"name": name, "arguments": item["arguments"]},
    }


def _result(item: JsonObject) -> JsonObject:
    output = item["output"]
    content = output if isinstance(output, str) else _text_parts(output)
    return {"role": "tool", "tool_call_id": item["call_id"], "content": content}


def _text_parts(parts: Sequence[JsonObject]) -> str | list[JsonObject]:
    if len(parts) == 1:
        return _part_text(parts[0])
    return [{"type": "text", "text": _part_text(part)} for part in parts]


def _part_text(part: JsonObject) -> str:
    text: str = part["refusal"] if part["type"] == "refusal" else part["text"]
    return text


def _thoughts(item: JsonObject, room: Room | None) -> list[str]:
    """What was thought, else what was packed of it; summaries are not what the model wrote."""
    if item.get("content"):
        return [part["text"] for part in item["content"]]
    text = unpacked(item.get("encrypted_content") or "", room)
    return [] if text is None else [text]


def chat_request(
    body: ResponsesRequest,
    box: Toolbox,
    choice: str | NamedChoice | None,
    messages: list[JsonObject],
    session: str | None,
) -> ChatRequest:
    """The turn as a chat request. `session`: the one that it goes on, where its client names none."""
    if body.max_output_tokens is not None and not 1 <= body.max_output_tokens <= INT64_MAX:
        raise ApiError("max_output_tokens: must be at least 1", param="max_output_tokens")
    logprobs = bool(body.top_logprobs) or "message.output_text.logprobs" in (body.include or ())
    return ChatRequest(
        model=body.model,
        messages=messages,
        tools=list(box.defs) or None,
        tool_choice=choice if box.defs or choice == "required" else None,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body.text.format if body.text else None),
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        logprobs=logprobs or None,
        top_logprobs=body.top_logprobs if logprobs else None,
        seed=body.seed,
        top_k=body.top_k,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        priority=body.priority,
        cache_salt=body.cache_salt,
        session_id=body.session_id,
        vllm_xargs=None if session is None else {"session_id": session},  # a header says more
        chat_template_kwargs=body.chat_template_kwargs,
        thinking_token_budget=body.thinking_token_budget,
        slo=body.slo,
        service_tier=body.service_tier,
    )


def _format(wanted: TextFormat | None) -> ResponseFormat | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return ResponseFormat("json_object")
    if wanted.type != "json_schema":
        raise ApiError(
            f"text.format.type: {wanted.type[:40]!r} is not one of text, json_object, json_schema",
            param="text.format.type",
        )
    if wanted.schema is None:
        raise ApiError("text.format.schema: missing", param="text.format.schema")
    named = JsonSchemaFormat(wanted.name or "response", wanted.schema, wanted.strict)
    return ResponseFormat("json_schema", named)
