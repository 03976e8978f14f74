"""What a model reads of the result of an MCP tool. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from tools_bridge.mcp.types import Answer

Unread = Callable[[str], str | None]
"""What is read instead of a part of this kind (image, audio, resource, …)."""

MOST_REASON = 500  # characters of a server's own words about an error


def answer(
    content: Sequence[Mapping[str, object]], structured: object, *, failed: bool, unread: Unread
) -> Answer:
    """`content`: blocks as the protocol has them; `structured`: a JSON value that says the same, or None.

    Texts are joined. Where there is no text, the structured content is read as JSON; a server that has both
    says in the text what the structure says. ValueError: a number of it is none.
    """
    texts = [_text(block, unread) for block in content]
    if structured is not None and not any(block.get("type") == "text" for block in content):
        texts.append(json.dumps(structured, ensure_ascii=False, allow_nan=False))
    return Answer("\n".join(text for text in texts if text), failed)


def _text(block: Mapping[str, object], unread: Unread) -> str:
    kind = str(block.get("type"))[:40]
    if kind == "text":
        return str(block.get("text", ""))
    if kind == "resource":
        inside = block.get("resource")
        text = inside.get("text") if isinstance(inside, Mapping) else None
        if isinstance(text, str):
            return text
        kind = "document"
    if kind == "resource_link":
        return f"[{str(block.get('name', ''))[:200]}: {str(block.get('uri', ''))[:2000]}]"
    return unread(kind) or f"[{kind}: not readable by this model]"


def reason(text: str) -> str:
    """A server's words about an error, in one short line."""
    line = " ".join(text.split())
    return line if len(line) <= MOST_REASON else line[:MOST_REASON] + "…"


def without(text: str, secrets: Sequence[str]) -> str:
    """A server may show what it was sent."""
    for secret in secrets:
        text = text.replace(secret, "[secret]")
    return text


def secrets_of(headers: Mapping[str, str]) -> list[str]:
    """Values of headers that are long enough to be known by themselves; longest first."""
    values = {part for value in headers.values() for part in (value, value.rpartition(" ")[2])}
    return sorted((value for value in values if len(value) >= 8), key=len, reverse=True)
