"""From the turns of a Messages body to chat messages. Pure.

Consecutive turns of one role are one turn, as Anthropic has it. Of a user's turn the tool results come
first, for they answer the calls right before it. An assistant's texts are joined without anything in
between: so the history of a session comes back as the server told it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from agentserve.server.errors import ApiError
from agentserve.server.http.anthropic.offered import Offered
from agentserve.server.http.anthropic.schemas import Block, Content, Turn
from agentserve.server.http.anthropic.signature import hidden
from agentserve.server.http.left_out import listed
from agentserve.server.text_port import JsonObject
from agentserve.text.conversation import unread

log = logging.getLogger(__name__)

_NONCE = re.compile(r"x-anthropic-billing-header:[^\n]*(?:\n|$)", re.IGNORECASE)
"""A line that Claude Code puts before its system text, with a number that is another in each request."""

_OTHERS_TOOLS = re.compile(r"server_tool_use|\w+_tool_result")
"""Blocks that tell of tools which Anthropic's servers ran."""

_READS_AS_ERROR = ("error", "<tool_use_error>")


@dataclass(slots=True)
class History:
    """Chat messages, and where in the body each of them came from."""

    offered: Offered
    messages: list[JsonObject] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # types of blocks
    goes_on: bool = False  # the last turn is the assistant's, to be continued

    def add(self, message: JsonObject, place: str) -> None:
        self.messages.append(message)
        self.places.append(place)


def history_of(system: Content | None, turns: Sequence[Turn], offered: Offered) -> History:
    """All of a conversation; an ApiError names the turn and block that cannot be taken. What it says of
    tools `offered` hears."""
    if not turns:
        raise ApiError("messages: at least one message is needed", param="messages", code="empty_messages")
    history = History(offered)
    if system is not None:
        _system(history, system, "system", "system")
    first = 0
    for end in range(1, len(turns) + 1):
        role = turns[first].role
        if end < len(turns) and turns[end].role == role:
            continue
        run = [(turns[i].content, f"messages[{i}]") for i in range(first, end)]
        match role:
            case "user":
                _user(history, run)
            case "assistant":
                _assistant(history, run, last=end == len(turns))
            case "system":
                for content, place in run:
                    _system(history, content, place, f"{place}.content")
            case _:
                place = f"messages[{first}].role"
                raise ApiError(f"{place}: {role[:40]!r} is not one of user, assistant, system", param=place)
        first = end
    if history.left_out:
        log.info("messages: blocks were left out: %s", listed(history.left_out))
    return history


def _system(history: History, content: Content, place: str, where: str) -> None:
    """A system message, unless nothing is left of it without the nonce."""
    said = _texts(history, content, where)
    texts = [_NONCE.sub("", text, count=1) if _NONCE.match(text) else text for text in said]
    if any(texts):
        history.add({"role": "system", "content": _parts(texts)}, place)


def _user(history: History, run: Sequence[tuple[Content, str]]) -> None:
    texts: list[str] = []
    answered = False
    for content, place in run:
        for block, here in _blocks(content, f"{place}.content"):
            if block.type == "tool_result":
                history.add(_result(history, block, here), here)
                answered = True
            else:
                texts += _text(history, block, here)
    if any(texts) or not answered:
        history.add({"role": "user", "content": _parts(texts)}, run[0][1])


def _assistant(history: History, run: Sequence[tuple[Content, str]], *, last: bool) -> None:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[JsonObject] = []
    for content, place in run:
        for block, here in _blocks(content, f"{place}.content"):
            match block.type:
                case "tool_use":
                    calls.append(_call(block, here))
                case "thinking":
                    thoughts.append(block.thinking or hidden(block.signature or ""))
                case "redacted_thinking":
                    pass  # none of ours: the text is with who made it
                case _:
                    texts += _text(history, block, here)
    message: JsonObject = {"role": "assistant", "content": "".join(texts)}
    place = run[0][1]
    if calls:
        if last:
            raise ApiError(
                f"{place}: ends in tool_use blocks; a user message with their tool_result blocks must follow",
                param=place,
                code="missing_tool_result",
            )
        message["tool_calls"] = calls
    if thought := "".join(thoughts):
        message["reasoning_content"] = thought
    history.goes_on = last
    history.add(message, place)


def _call(block: Block, where: str) -> JsonObject:
    if not block.name:
        raise ApiError(f"{where}.name: missing", param=f"{where}.name")
    try:
        arguments = bytes(block.input).decode()
    except UnicodeDecodeError:
        raise ApiError(f"{where}.input: not UTF-8", param=f"{where}.input", code="invalid_json") from None
    if not arguments.lstrip().startswith("{") and arguments.strip() != "null":
        raise ApiError(f"{where}.input: must be an object", param=f"{where}.input")
    return {
        "id": block.id,
        "type": "function",
        "function": {"name": block.name, "arguments": arguments},
    }


def _result(history: History, block: Block, where: str) -> JsonObject:
    """A tool message. That it tells of an error no template can say but in words."""
    texts = [
        text
        for part, here in _blocks(_content(block, where), f"{where}.content")
        for text in _told(history, part, here)
    ]
    if block.is_error and not (texts and texts[0].lstrip().lower().startswith(_READS_AS_ERROR)):
        texts[:1] = [f"Error: {texts[0]}" if texts else "Error"]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": _parts(texts)}


def _told(history: History, part: Block, where: str) -> list[str]:
    """What the model reads of a part of a result: of one that is no text, that there was one."""
    instead = unread(part.type)
    if instead is None or (part.type == "document" and _is_text(part)):
        return _text(history, part, where)
    return [instead]


def _texts(history: History, content: Content, where: str) -> list[str]:
    return [text for block, here in _blocks(content, where) for text in _text(history, block, here)]


def _text(history: History, block: Block, where: str) -> list[str]:
    """What a block says, in as many texts as it has; an ApiError where it is no text."""
    match block.type:
        case "text":
            if block.text is None:
                raise ApiError(f"{where}.text: missing", param=f"{where}.text")
            return [block.text]
        case "document":
            said = _document(history, block, where)
            return ["\n".join(text for text in (block.title, block.context, *said) if text)]
        case "search_result":
            source = block.source if isinstance(block.source, str) else None
            said = _texts(history, _content(block, where), f"{where}.content")
            return ["\n".join(text for text in (block.title, source, *said) if text)]
        case "tool_reference":
            return [history.offered.refer(block.tool_name or "")]
        case "tool_addition":
            return [history.offered.add(block.tool, f"{where}.tool")]
        case "tool_removal":
            return [history.offered.remove(block.tool, f"{where}.tool")]
        case "compaction":
            return [block.content] if isinstance(block.content, str) else []
    if _OTHERS_TOOLS.fullmatch(block.type):
        history.left_out.append(block.type)
        return []
    raise ApiError(
        f"{where}.type: blocks of type {block.type[:40]!r} are not supported, this model reads text",
        param=f"{where}.type",
        code="unsupported_content",
    )


def _is_text(document: Block) -> bool:
    return isinstance(document.source, dict) and document.source.get("type") in ("text", "content")


def _document(history: History, block: Block, where: str) -> list[str]:
    """The text of a document that is text."""
    source = block.source if isinstance(block.source, dict) else {}
    if source.get("type") == "text" and isinstance(data := source.get("data"), str):
        return [data]
    if source.get("type") == "content":
        inside = f"{where}.source.content"
        return _texts(history, _convert(source.get("content"), inside), inside)
    raise ApiError(
        f"{where}.source: only documents of text are supported, not of type {str(source.get('type'))[:40]!r}",
        param=f"{where}.source",
        code="unsupported_content",
    )


def _content(block: Block, where: str) -> Content:
    return _convert(block.content, f"{where}.content")


def _convert(content: object, where: str) -> Content:
    try:
        found: Content = msgspec.convert(content if content is not None else "", Content)
    except msgspec.ValidationError as error:
        raise ApiError(f"{where}: {error}", param=where) from None
    return found


def _blocks(content: Content, where: str) -> Iterator[tuple[Block, str]]:
    """The blocks of a content, and where each is. A string is a block of text, an empty one is none."""
    if isinstance(content, str):
        if content:
            yield Block(type="text", text=content), where
        return
    for number, block in enumerate(content):
        yield block, f"{where}[{number}]"


def _parts(texts: Sequence[str]) -> str | list[JsonObject]:
    texts = [text for text in texts if text]
    if len(texts) < 2:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]
