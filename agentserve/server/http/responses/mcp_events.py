"""The events of items about MCP servers. Pure.

A call's item stays open while the call runs, beside others; the model's reply has ended by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agentserve.server.agents.runners import ToolOutcome
from agentserve.server.http.responses.item_fields import NewId
from agentserve.server.http.responses.mcp_items import CALL, LISTING, REQUEST, error_object, item_id
from agentserve.server.http.responses.tools import Toolbox
from agentserve.server.sessions.answer import CallDelta
from agentserve.server.text_port import JsonObject

ARGUMENTS = {
    "function_call": "response.function_call_arguments",
    CALL: "response.mcp_call_arguments",
}
"""Kinds of items whose arguments are told as they come."""


def call_item(box: Toolbox, call: CallDelta, new_id: NewId, step: int) -> JsonObject:
    """The item of a call that begins, by whose tool it is."""
    assert call.id is not None
    name = call.name or ""
    remote = box.remote.get(name)
    if remote is None:
        id_ = new_id("fc")
        return {
            "id": item_id(id_, call.id, step) if box.remote else id_,
            "type": "function_call",
            "status": "in_progress",
            "call_id": call.id,
            **box.told(name),
            "arguments": "",
        }
    named: JsonObject = {"server_label": remote.server.label, "name": remote.name, "arguments": ""}
    if remote.approval:
        return {"id": item_id(new_id("mcpr"), call.id, step), "type": REQUEST, **named}
    return _made_here(item_id(new_id("mcp"), call.id, step), named, None)


def _made_here(id_: str, named: JsonObject, request: str | None) -> JsonObject:
    return {
        "id": id_,
        "type": CALL,
        "status": "in_progress",
        "approval_request_id": request,
        **named,
        "output": None,
        "error": None,
    }


def is_open(item: JsonObject) -> bool:
    return bool(item["type"] == CALL and item["status"] == "in_progress")


def was_made(item: JsonObject) -> bool:
    """By this server, before the model said a word."""
    return bool(item["type"] == LISTING or (item["type"] == CALL and item["approval_request_id"]))


class Numbered:
    """Makes the events of one stream: each has the next number."""

    def __init__(self) -> None:
        self.last = -1

    def __call__(self, kind: str, **fields: object) -> JsonObject:
        self.last += 1
        return {"type": kind, "sequence_number": self.last, **fields}


class McpEvents:
    """Of one response. `event` numbers them; `output` are the response's items."""

    def __init__(self, event: Numbered, output: list[JsonObject], new_id: NewId) -> None:
        self._event = event
        self._output = output
        self._new_id = new_id
        self._places: dict[str, int] = {}  # of items, the first of each id
        self._known = 0  # items that are among them

    @property
    def open(self) -> list[JsonObject]:
        """Calls that have no result yet, in call order."""
        return [item for item in self._output if is_open(item)]

    def listed(self, items: Iterable[JsonObject]) -> list[JsonObject]:
        """The tools of servers, before anything is said."""
        events: list[JsonObject] = []
        for item in items:
            events += self.begin({**item, "tools": []})
            events.append(self._of(item, "response.mcp_list_tools.in_progress"))
            self._output[-1] = item
            events += [self._of(item, "response.mcp_list_tools.completed"), self.done(item)]
        return events

    def approved(self, request: JsonObject) -> list[JsonObject]:
        """A call that was asked for is made now."""
        named = {key: request[key] for key in ("server_label", "name", "arguments")}
        item = _made_here(self._new_id("mcp"), named, request["id"])
        return [
            *self.begin(item),
            self._of(item, "response.mcp_call_arguments.done", arguments=item["arguments"]),
        ]

    def begin(self, item: JsonObject) -> list[JsonObject]:
        """It is the last item from now on. Requests are told when they are whole."""
        self._output.append(item)
        if item["type"] == REQUEST:
            return []
        events = [self._about("response.output_item.added", item)]
        if item["type"] == CALL:
            events.append(self._of(item, "response.mcp_call.in_progress"))
        return events

    def put(self, id_: str, outcome: ToolOutcome) -> None:
        """What a call came to. It is told by `ran`."""
        item = self._output[self._place(id_)]
        if outcome.error is None:
            item["status"], item["output"] = "completed", str(outcome.output)
        else:
            item["status"], item["error"] = "failed", error_object(outcome.error)

    def ran(self, id_: str) -> list[JsonObject]:
        item = self._output[self._place(id_)]
        return [self._of(item, f"response.mcp_call.{item['status']}"), self.done(item)]

    def cut_off(self, items: Sequence[JsonObject]) -> list[JsonObject]:
        """Calls of a reply that is not whole are not made; nobody waits for those of a cancelled one."""
        events: list[JsonObject] = []
        for item in items:
            if is_open(item):
                item["status"] = "incomplete"
                events.append(self.done(item))
        return events

    def whole(self, request: JsonObject) -> list[JsonObject]:
        return [self._about("response.output_item.added", request), self.done(request)]

    def done(self, item: JsonObject) -> JsonObject:
        return self._about("response.output_item.done", item)

    def again(self, item: JsonObject) -> list[JsonObject]:
        """The events of an item that was made before."""
        if item["type"] == LISTING:
            return self.listed([item])
        if item["type"] == REQUEST:
            self._output.append(item)
            return self.whole(item)
        events = self.begin({**item, "status": "in_progress", "arguments": "", "output": None, "error": None})
        self._output[-1] = item
        if item["arguments"]:
            events.append(self._of(item, f"{ARGUMENTS[CALL]}.delta", delta=item["arguments"]))
        events.append(self._of(item, f"{ARGUMENTS[CALL]}.done", arguments=item["arguments"]))
        if item["status"] != "incomplete":
            events.append(self._of(item, f"response.mcp_call.{item['status']}"))
        return [*events, self.done(item)]

    def _of(self, item: JsonObject, kind: str, **fields: object) -> JsonObject:
        return self._event(kind, item_id=item["id"], output_index=self._place(item["id"]), **fields)

    def _about(self, kind: str, item: JsonObject) -> JsonObject:
        return self._event(kind, output_index=self._place(item["id"]), item=dict(item))

    def _place(self, id_: str) -> int:
        if self._known > len(self._output):  # they were dropped
            self._places, self._known = {}, 0
        for index in range(self._known, len(self._output)):
            self._places.setdefault(self._output[index]["id"], index)
        self._known = len(self._output)
        return self._places[id_]
