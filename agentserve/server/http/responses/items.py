"""Input items, checked and in one form: that in which they are kept and listed.

Kinds of items that mean nothing to this server (hosted tools' calls, say) are skipped; content that
would be lost on the model (images, files) is refused, but for that of tools, whose results stay. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentserve.server.errors import ApiError
from agentserve.server.http.responses.item_fields import NewId, broken, name, own_id, status, text
from agentserve.server.http.responses.mcp_items import READERS as MCP_READERS
from agentserve.server.text_port import JsonObject
from agentserve.text.conversation import unread

ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text")


@dataclass(frozen=True, slots=True)
class Reference:
    """An item that is named instead of sent."""

    id: str


@dataclass(frozen=True, slots=True)
class Given:
    """The input of a request: items, references among them, and where each of them stood. `skipped`: kinds
    that were left out."""

    items: tuple[JsonObject | Reference, ...]
    places: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


def read_input(
    given: str | Sequence[JsonObject] | None, new_id: NewId, *, most: int, param: str = "input"
) -> Given:
    """All items of an input; the first one that is broken is an ApiError that names its place."""
    if given is None:
        return Given(())
    if isinstance(given, str):
        return Given((_message({"role": "user", "content": given}, param, new_id),), (param,))
    if len(given) > most:
        raise ApiError(f"{param}: {len(given)} items, at most {most} are allowed", param=param)
    items: list[JsonObject | Reference] = []
    places: list[str] = []
    skipped: list[str] = []
    for index, item in enumerate(given):
        place = f"{param}[{index}]"
        kind = _kind(item, place)
        reader = _READERS.get(kind)
        if kind != "item_reference" and reader is None:
            skipped.append(kind[:40])
            continue
        places.append(place)
        if reader is None:
            items.append(Reference(name(item, "id", place)))
        else:
            items.append(reader(item, place, new_id))
    return Given(tuple(items), tuple(places), tuple(skipped))


def _kind(item: JsonObject, place: str) -> str:
    kind = item.get("type")
    if kind is None:
        if "role" in item:
            return "message"
        if "id" in item:
            return "item_reference"
        raise broken(f"{place}.type", "an item needs a type, or a role and content")
    if not isinstance(kind, str):
        raise broken(f"{place}.type", "must be a string")
    return kind


def _message(item: JsonObject, place: str, new_id: NewId) -> JsonObject:
    role = item.get("role")
    if role not in ROLES:
        raise broken(f"{place}.role", f"unknown role {str(role)[:40]!r}, expected one of {', '.join(ROLES)}")
    kept: JsonObject = {
        "id": own_id(item, place, "msg", new_id),
        "type": "message",
        "status": status(item),
        "role": role,
        "content": _content(item.get("content"), f"{place}.content", says=role == "assistant"),
    }
    if isinstance(item.get("phase"), str):
        kept["phase"] = item["phase"]
    return kept


def _content(content: object, place: str, *, says: bool) -> list[JsonObject]:
    """A list of text parts; `says`: of the assistant's."""
    if isinstance(content, str):
        content = [{"type": "output_text" if says else "input_text", "text": content}]
    if not isinstance(content, list):
        raise broken(place, "must be a string or a list of parts")
    return [_part(part, f"{place}[{index}]", says=says) for index, part in enumerate(content)]


def _part(part: object, place: str, *, says: bool) -> JsonObject:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and kind == "refusal":
        return {"type": "refusal", "refusal": text(part, "refusal", place)}
    if not isinstance(part, dict) or kind not in _TEXT_PARTS:
        raise broken(
            f"{place}.type",
            f"content of type {str(kind)[:40]!r} is not supported, only text is",
            "unsupported_content",
        )
    words = text(part, "text", place)
    if not says:
        return {"type": "input_text", "text": words}
    kept: JsonObject = {"type": "output_text", "text": words, "annotations": []}
    if isinstance(part.get("logprobs"), list):
        kept["logprobs"] = part["logprobs"]
    return kept


def _function_call(item: JsonObject, place: str, new_id: NewId) -> JsonObject:
    arguments = item.get("arguments")
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if arguments is not None and not isinstance(arguments, str):
        raise broken(f"{place}.arguments", "must be a string of JSON")
    kept: JsonObject = {
        "id": own_id(item, place, "fc", new_id),
        "type": "function_call",
        "status": status(item),
        "call_id": name(item, "call_id", place),
        "name": name(item, "name", place),
        "arguments": arguments or "",
    }
    if item.get("namespace") is not None:
        kept["namespace"] = name(item, "namespace", place)
    return kept


def _function_call_output(item: JsonObject, place: str, new_id: NewId) -> JsonObject:
    output = item.get("output")
    if not isinstance(output, str):
        output = _output(output, f"{place}.output")
    return {
        "id": own_id(item, place, "fco", new_id),
        "type": "function_call_output",
        "status": status(item),
        "call_id": name(item, "call_id", place),
        "output": output,
    }


def _output(output: object, place: str) -> list[JsonObject]:
    """A tool's parts; those that are no text are kept as what the model reads instead of them."""
    if isinstance(output, list):
        output = [_told(part) for part in output]
    return _content(output, place, says=False)


def _told(part: object) -> object:
    instead = unread(part.get("type")) if isinstance(part, dict) else None
    return part if instead is None else {"type": "input_text", "text": instead}


def _reasoning(item: JsonObject, place: str, new_id: NewId) -> JsonObject:
    kept: JsonObject = {
        "id": own_id(item, place, "rs", new_id),
        "type": "reasoning",
        "summary": _texts(item.get("summary"), f"{place}.summary", "summary_text"),
    }
    if item.get("content") is not None:
        kept["content"] = _texts(item["content"], f"{place}.content", "reasoning_text")
    if item.get("encrypted_content") is not None:
        kept["encrypted_content"] = text(item, "encrypted_content", place)
    return kept


def _texts(parts: object, place: str, kind: str) -> list[JsonObject]:
    if parts is None:
        return []
    if not isinstance(parts, list):
        raise broken(place, "must be a list of parts")
    kept: list[JsonObject] = []
    for index, part in enumerate(parts):
        here = f"{place}[{index}]"
        if not isinstance(part, dict):
            raise broken(here, "an object is expected")
        kept.append({"type": kind, "text": text(part, "text", here)})
    return kept


_READERS: dict[str, Callable[[JsonObject, str, NewId], JsonObject]] = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
    "reasoning": _reasoning,
    **MCP_READERS,
}
