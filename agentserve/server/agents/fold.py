"""From the pieces of a reply to items: what opens, grows and closes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentserve.server.agents.records import (
    AgentConfig,
    CallItem,
    MessageItem,
    ReasoningItem,
    Said,
)
from agentserve.server.sessions.answer import Call, Delta, Outcome
from agentserve.server.text_port import JsonObject
from agentserve.text.conversation import parse_message


@dataclass(frozen=True, slots=True)
class Opened:
    item: Said
    index: int  # among what the agent said in its turn


@dataclass(frozen=True, slots=True)
class Grew:
    item: MessageItem | ReasoningItem
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    item: MessageItem | ReasoningItem
    index: int


Step = Opened | Grew | Closed
NewId = Callable[[str], str]


class Fold:
    """One reply. Calls are items only once the reply is whole."""

    def __init__(
        self, config: AgentConfig, new_id: NewId, first: int, deadline: Callable[[str], float | None]
    ):
        """`first`: the index of its first item. `deadline`: of a call of a tool, in Unix time."""
        self._config = config
        self._new_id = new_id
        self._first = first
        self._deadline = deadline
        self._done: list[Said] = []
        self._open: MessageItem | ReasoningItem | None = None
        self._pieces: list[str] = []
        self._blank = ""  # white space that may be nothing but the distance to a call

    def delta(self, piece: Delta) -> list[Step]:
        steps: list[Step] = []
        if piece.reasoning:
            steps += self._grow(ReasoningItem, "rs", piece.reasoning)
        if piece.text:
            text, self._blank = self._blank + piece.text, ""
            if isinstance(self._open, MessageItem) or text.strip():
                steps += self._grow(MessageItem, "msg", text)
            else:
                self._blank = text
        return steps

    def finish(self, outcome: Outcome) -> tuple[list[Step], tuple[Said, ...]]:
        """The last steps, and all items."""
        calls = outcome.calls
        cut = not outcome.has_calls and (bool(calls) or outcome.truncated or outcome.reason.value == "length")
        steps = self._close(final=not calls, whole=not cut)
        for item in calls_of(self._config, calls if outcome.has_calls else (), self._new_id, self._deadline):
            self._done.append(item)
            steps.append(Opened(item, self._first + len(self._done) - 1))
        if not self._done:  # the model said nothing at all
            self._open, self._pieces = MessageItem(self._new_id("msg"), ""), []
            steps.append(Opened(self._open, self._first))
            steps += self._close(final=True, whole=not cut)
        return steps, tuple(self._done)

    def broken(self) -> list[Step]:
        """It came to nothing."""
        return self._close(final=False, whole=False)

    def _grow(self, kind: type[MessageItem] | type[ReasoningItem], prefix: str, text: str) -> list[Step]:
        steps: list[Step] = []
        if not isinstance(self._open, kind):
            steps += self._close(final=True, whole=True)
            self._open, self._pieces = kind(self._new_id(prefix), ""), []
            steps.append(Opened(self._open, self._index))
        assert self._open is not None
        self._pieces.append(text)
        return [*steps, Grew(self._open, self._index, text)]

    @property
    def _index(self) -> int:
        return self._first + len(self._done)

    def _close(self, *, final: bool, whole: bool) -> list[Step]:
        item, text = self._open, "".join(self._pieces)
        if item is None:
            return []
        if isinstance(item, MessageItem):
            item = MessageItem(item.id, text, final, whole)
        else:
            item = ReasoningItem(item.id, text, whole)
        step = Closed(item, self._index)
        self._done.append(item)
        self._open, self._pieces = None, []
        return [step]


def calls_of(
    config: AgentConfig, calls: Sequence[Call], new_id: NewId, deadline: Callable[[str], float | None]
) -> list[CallItem]:
    found: list[CallItem] = []
    for call in calls:
        tool = config.tool(call.name)
        found.append(
            CallItem(
                id=new_id("mcp" if tool is not None and tool.kind == "mcp" else "fc"),
                call=call.id,
                name=call.name,
                arguments=call.arguments,
                kind="function" if tool is None else tool.kind,
                background=tool is not None and tool.background,
                deadline=deadline(call.name),
                whole=call.complete,
                server="" if tool is None else tool.server,
                remote="" if tool is None else tool.remote,
                approval=tool is not None and tool.approval,
                webhook=None if tool is None else config.webhook_of(tool),
            )
        )
    return found


def items_of_message(
    config: AgentConfig,
    message: JsonObject,
    new_id: NewId,
    deadline: Callable[[str], float | None],
    *,
    whole: bool = True,
) -> tuple[Said, ...]:
    """A reply as the session's transcript has it, but for calls that are not to be run: then it is not
    `whole`."""
    items: list[Said] = []
    raw = message.get("tool_calls") or []
    text = parse_message(message | {"tool_calls": None}).text
    if message.get("reasoning_content"):
        items.append(ReasoningItem(new_id("rs"), message["reasoning_content"], whole or bool(text)))
    if text or not (raw or items):
        items.append(MessageItem(new_id("msg"), text, final=whole and not raw, whole=whole))
    calls = [Call(c["id"], c["function"]["name"], c["function"]["arguments"], True) for c in raw]
    return (*items, *calls_of(config, calls, new_id, deadline))
