"""Items about MCP servers: listings, calls that this server makes, approvals. Pure.

Such a call has no `call_id`, so that of the session is read from the item's id: `<prefix>_`, the 24 digits
of the call's id, 22 random ones, and two that count the model calls of its response. By these it is known
which calls were one reply of the model: history shows them as they were said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from agentserve.server.agents.runners import ToolOutcome
from agentserve.server.http.responses.item_fields import NewId, broken, name, own_id, status, text
from agentserve.server.text_port import JsonObject

LISTING, CALL, REQUEST, RESPONSE = (
    "mcp_list_tools",
    "mcp_call",
    "mcp_approval_request",
    "mcp_approval_response",
)
DENIED = "The user did not allow this call."
UNDECIDED = "The user has not allowed this call."
_OURS = re.compile(r"[a-z]+_([0-9a-f]{24})[0-9a-f]{22}([0-9a-f]{2})")
_CALL_ID = re.compile(r"call_([0-9a-f]{24})")

Names = Mapping[tuple[str, str], str]
"""What the model calls a server's tool, by the server's label and its own name of it."""


def item_id(fresh: str, call: str, step: int) -> str:
    """An id for an item of a call; `fresh` is one of its kind."""
    found, given = _OURS.fullmatch(fresh), _CALL_ID.fullmatch(call)
    if found is None:
        return fresh
    prefix, digits = fresh.split("_")
    return f"{prefix}_{found[1] if given is None else given[1]}{digits[24:46]}{step % 256:02x}"


def call_id(item: JsonObject) -> str:
    """Of the call that an `mcp_call`, or a request to approve one, is about."""
    id_: str = item.get("approval_request_id") or item["id"]
    found = _OURS.fullmatch(id_)
    return id_ if found is None else f"call_{found[1]}"


def step_of(item: JsonObject) -> str:
    """Items of calls with the same one were one reply."""
    found = _OURS.fullmatch(item["id"])
    return item["id"] if found is None else found[2]


def chat_call(item: JsonObject, names: Names) -> JsonObject:
    shown = names.get((item["server_label"], item["name"]), item["name"])
    function = {"name": shown, "arguments": item["arguments"]}
    return {"id": call_id(item), "type": "function", "function": function}


def result_of(item: JsonObject, none: str) -> str | None:
    """What the model reads of a call that was made; `none`: where it was made in vain. None: it is not
    whole, and has no result."""
    if item["output"] is not None:
        output: str = item["output"]
        return output
    if item["error"] is not None:
        return str(ToolOutcome(error=error_text(item["error"])).content)
    return none if _is_object(item["arguments"]) else None


def answers(items: Iterable[JsonObject]) -> dict[str, JsonObject]:
    """What was said to requests for approval, by their ids: the first counts."""
    found: dict[str, JsonObject] = {}
    for item in items:
        if item["type"] == RESPONSE:
            found.setdefault(item["approval_request_id"], item)
    return found


def undone(history: Iterable[JsonObject]) -> list[JsonObject]:
    """Requests that were approved and whose calls were not made."""
    items = list(history)
    said = answers(items)
    made = {item["approval_request_id"] for item in items if item["type"] == CALL}
    return [
        item
        for item in {item["id"]: item for item in items if item["type"] == REQUEST}.values()
        if item["id"] not in made and said.get(item["id"], {}).get("approve")
    ]


def error_object(message: str) -> JsonObject:
    return {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": message}]}


def error_text(error: JsonObject | str) -> str:
    if isinstance(error, str):
        return error
    content = error.get("content", error.get("message", ""))
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, dict))
        return "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments or "{}"), dict)
    except (ValueError, RecursionError):
        return False


# --- as clients send them back ---------------------------------------------------------


def _listing(item: JsonObject, place: str, new_id: NewId) -> JsonObject:
    tools = item.get("tools")
    if not isinstance(tools, list):
        raise broken(f"{place}.tools", "must be a list of tools")
    return {
        "id": own_id(item, place, "mcpl", new_id),
        "type": LISTING,
        "server_label": name(item, "server_label", place),
        "tools": [_tool(tool, f"{place}.tools[{index}]") for index, tool in enumerate(tools)],
        "error": _optional(item, "error", place),
    }


def _tool(tool: Any, place: str) -> JsonObject:
    if not isinstance(tool, dict):
        raise broken(place, "an object is expected")
    if not isinstance(tool.get("input_schema"), dict):
        raise broken(f"{place}.input_schema", "must be a JSON schema")
    return {
        "name": name(tool, "name", place),
        "description": _optional(tool, "description", place),
        "input_schema": tool["input_schema"],
        "annotations": None,
    }


def _request(item: JsonObject, place: str, new_id: NewId) -> JsonObject:
    return {"id": own_id(item, place, "mcpr", new_id), "type": REQUEST, **_named(item, place)}


def _call(item: JsonObject, place: str, new_id: NewId) -> JsonObject:
    error = item.get("error")
    if not (error is None or isinstance(error, str | dict)):
        raise broken(f"{place}.error", "must be an object")
    failed = error is not None
    return {
        "id": own_id(item, place, "mcp", new_id),
        "type": CALL,
        "status": "failed" if failed else status(item),
        "approval_request_id": _optional(item, "approval_request_id", place),
        **_named(item, place),
        "output": _optional(item, "output", place),
        "error": error,
    }


def _response(item: JsonObject, place: str, new_id: NewId) -> JsonObject:
    approve = item.get("approve")
    if not isinstance(approve, bool):
        raise broken(f"{place}.approve", "must be true or false")
    return {
        "id": own_id(item, place, "mcpa", new_id),
        "type": RESPONSE,
        "approval_request_id": name(item, "approval_request_id", place),
        "approve": approve,
        "reason": _optional(item, "reason", place),
    }


def _named(item: JsonObject, place: str) -> JsonObject:
    return {
        "server_label": name(item, "server_label", place),
        "name": name(item, "name", place),
        "arguments": text(item, "arguments", place),
    }


def _optional(item: JsonObject, key: str, place: str) -> str | None:
    return None if item.get(key) is None else text(item, key, place)


READERS: dict[str, Callable[[JsonObject, str, NewId], JsonObject]] = {
    LISTING: _listing,
    CALL: _call,
    REQUEST: _request,
    RESPONSE: _response,
}
