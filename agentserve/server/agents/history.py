"""One agent session's record: its head, turns and batches, and what follows from them. No event loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from agentserve.server.agents.records import (
    OUTSIDE,
    AgentConfig,
    AgentTool,
    ApprovalItem,
    Batch,
    CallItem,
    Failure,
    Happened,
    Head,
    Item,
    ListingItem,
    McpServer,
    MessageItem,
    OutputItem,
    ReasoningItem,
    Turn,
    Usage,
    UserItem,
    derived_id,
)

_ITEM_BYTES = 200
_SESSION_BYTES = 2048
_NOT_SAID = (UserItem, OutputItem, ListingItem, ApprovalItem)
"""What the agent does not bring forth."""


@dataclass(slots=True, eq=False)
class History:
    head: Head
    turns: list[Turn] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    owed: dict[Happened, None] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.head.id

    @property
    def config(self) -> AgentConfig:
        """With the tools of its MCP servers, as they were listed first: a prompt begins with them."""
        given = self.head.config
        if not given.servers:
            return given
        tools = list(given.tools)
        names = {tool.name for tool in tools}
        for server in given.servers:
            listing = self.listing(server)
            for tool in () if listing is None else listing.tools:
                if tool.name not in names:  # else a tool that came later has its name
                    names.add(tool.name)
                    tools.append(
                        AgentTool(
                            kind="mcp",
                            name=tool.name,
                            description=tool.description,
                            parameters=tool.parameters,
                            server=server.label,
                            remote=tool.remote,
                            approval=server.asks(tool.remote),
                        )
                    )
        return msgspec.structs.replace(given, tools=tuple(tools))

    def listing(self, server: McpServer) -> ListingItem | None:
        """The server's tools; None where they are not known yet."""
        found = (item for item, _ in self.items() if isinstance(item, ListingItem))
        return next((item for item in found if item.key == server.key and item.error is None), None)

    def approvals(self) -> dict[str, ApprovalItem]:
        return {item.call: item for item, _ in self.items() if isinstance(item, ApprovalItem)}

    def awaits_client(self, call: CallItem) -> bool:
        """An open call that the client has to do something for."""
        return call.kind in OUTSIDE or (call.approval and call.call not in self.approvals())

    @property
    def active(self) -> Turn | None:
        """The turn that is not over."""
        last = self.turns[-1] if self.turns else None
        return None if last is None or last.over else last

    @property
    def status(self) -> str:
        turn = self.active
        if turn is None:
            return "idle"
        return "requires_action" if turn.status == "waiting" else "in_progress"

    @property
    def usage(self) -> Usage | None:
        total = None
        for turn in self.turns:
            if turn.usage is not None:
                total = turn.usage if total is None else total.plus(turn.usage)
        return total

    @property
    def cost(self) -> int:
        """Bytes, roughly."""
        items = sum(item_cost(item) for batch in self.batches for item in batch.items)
        return _SESSION_BYTES + len(msgspec.json.encode(self.head.config)) + items + 256 * len(self.turns)

    def turn(self, id_: str) -> Turn | None:
        return next((turn for turn in self.turns if turn.id == id_), None)

    def items(self, turn: str | None = None) -> Iterator[tuple[Item, str]]:
        """Each with the turn that it belongs to, oldest first."""
        for batch in self.batches:
            if turn is None or batch.turn == turn:
                for item in batch.items:
                    yield item, batch.turn

    def outputs(self) -> dict[str, OutputItem]:
        return {item.call: item for item, _ in self.items() if isinstance(item, OutputItem)}

    def call(self, call: str) -> tuple[CallItem, Turn] | None:
        for item, turn in self.items():
            if isinstance(item, CallItem) and item.call == call:
                found = self.turn(turn)
                return None if found is None else (item, found)
        return None

    @property
    def steps(self) -> int:
        """The number of the last turn of the session that came to a reply."""
        return max((batch.step or 0 for batch in self.batches), default=0)

    def said_by(self, turn: str) -> int:
        """How many items the agent brought forth in it."""
        return sum(not isinstance(item, _NOT_SAID) for item, _ in self.items(turn))

    def open_calls(self, turn: Turn) -> list[CallItem]:
        """Calls of the turn that are waited for, in call order."""
        done = self.outputs()
        return [
            item
            for item, _ in self.items(turn.id)
            if isinstance(item, CallItem) and item.whole and not item.background and item.call not in done
        ]

    def required(self) -> list[CallItem]:
        """Calls that the client has to run, or to approve, before the session can go on."""
        turn = self.active
        return [] if turn is None else [call for call in self.open_calls(turn) if self.awaits_client(call)]

    def untold(self) -> list[tuple[CallItem, OutputItem]]:
        """Results of background calls that the model has not been told of."""
        outputs = self.outputs()
        told = {call for batch in self.batches for call in batch.told}
        return [
            (item, outputs[item.call])
            for item, _ in self.items()
            if isinstance(item, CallItem)
            and item.background
            and item.call in outputs
            and item.call not in told
        ]

    def asked(self, turn: Turn) -> list[UserItem]:
        return [item for item, _ in self.items(turn.id) if isinstance(item, UserItem)]

    def namer(self, turn: Turn) -> Callable[[str], str]:
        """Names the items of the turn's next reply: as they are told before anything of it is kept, and as
        they are made again of what the session kept. What died with its server, its name died with."""
        place = self.replies(turn)
        given: Counter[str] = Counter()

        def name(prefix: str) -> str:
            given[prefix] += 1
            return derived_id(prefix, self.id, turn.id, turn.lives, place, given[prefix])

        return name

    def replies(self, turn: Turn) -> int:
        """Of the model, in a turn."""
        return sum(batch.turn == turn.id and batch.step is not None for batch in self.batches)

    def output_id(self, turn: str, call: str) -> str:
        """The name of a call's result, which is told before it is kept."""
        return derived_id("fco", self.id, turn, call)

    def last_reply(self, turn: Turn) -> Batch | None:
        replies = (b for b in reversed(self.batches) if b.turn == turn.id and b.step is not None)
        return next(replies, None)

    def happened(self, event: Happened) -> bool:
        """It was written that it was owed; what it is about may not have been."""
        kind, number = event
        turn = next((turn for turn in self.turns if turn.number == number), None)
        if kind in ("created", "in_progress"):
            return kind == "created" or turn is not None
        return turn is not None and turn.over and kind in ("idle", turn.status)

    def answered(self, turn: Turn) -> bool:
        """Its last reply calls nothing that is waited for: it was the answer."""
        reply = self.last_reply(turn)
        return reply is not None and not any(
            isinstance(item, CallItem) and item.whole for item in reply.items
        )

    def fails(self, turn: Turn) -> Failure | None:
        """Why a turn whose last reply is there has failed nevertheless."""
        reply = self.last_reply(turn)
        if reply is not None and not all(
            item.whole for item in reply.items if isinstance(item, CallItem | MessageItem | ReasoningItem)
        ):
            return Failure("max_output_tokens", "The model reached its limit before its answer was whole.")
        return None


def item_cost(item: Item) -> int:
    size = _ITEM_BYTES
    for name in item.__struct_fields__:
        value = getattr(item, name)
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, list | tuple):
            size += sum(len(str(part)) for part in value)
    return size
