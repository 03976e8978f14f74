"""All agents and agent sessions of a server, bounded; on disk too where a book is given. No event loop.

Names of records: `a:AGENT`, `s:SESSION` (its head), `t:SESSION:n` (a turn), `i:SESSION:n` (a batch of items),
`e:SESSION` (events that are owed).
A record is written when it changes, so a session costs what is new in it, however long it is.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import msgspec

from agentserve.server.agents.history import History, item_cost
from agentserve.server.agents.records import (
    Batch,
    Happened,
    Head,
    Item,
    Owed,
    Record,
    SavedAgent,
    Turn,
    packed,
)
from agentserve.server.sessions.writer import Failure


class AgentsBook(Protocol):
    """What keeps records beyond the life of the process. No call blocks; changes are kept in their order."""

    def put(self, name: str, content: bytes) -> Future[None]: ...

    def drop(self, name: str) -> Future[None]: ...

    async def close(self) -> None: ...

    @property
    def failure(self) -> Failure | None:
        """Why it keeps nothing now."""
        ...


SPARE = 8  # one place of so many is for other tenants than the one that has most


class Full(Exception):
    """Every session has a running turn, and no further one may be opened."""


@dataclass(frozen=True, slots=True)
class AgentsBounds:
    sessions: int = 10_000
    bytes: int = 256 << 20  # of all sessions
    agents: int = 1000
    agents_bytes: int = 256 << 20  # of them together


class Shelf:
    def __init__(self, bounds: AgentsBounds | None = None, book: AgentsBook | None = None) -> None:
        self._bounds = bounds or AgentsBounds()
        self._book = book
        self._sessions: OrderedDict[str, History] = OrderedDict()  # the longest unused first
        self._costs: dict[str, int] = {}
        self._bytes = 0
        self.agents: dict[str, SavedAgent] = {}
        self._agent_costs: dict[str, int] = {}  # bytes
        self.forget: Callable[[History], None] = lambda history: None  # told of what is dropped

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[History]:
        return iter(list(self._sessions.values()))

    @property
    def failure(self) -> Failure | None:
        return None if self._book is None else self._book.failure

    @property
    def size_bytes(self) -> int:
        return self._bytes

    def get(self, tenant: str, id_: str) -> History | None:
        history = self._sessions.get(id_)
        return history if history is not None and history.head.tenant == tenant else None

    def find(self, id_: str) -> History | None:
        """Whoever's it is: for who proves otherwise that it may be asked for."""
        return self._sessions.get(id_)

    def has(self, history: History) -> bool:
        """It was not dropped."""
        return self._sessions.get(history.id) is history

    def sessions(self, tenant: str) -> list[History]:
        """In the order in which they were created."""
        own = (history for history in self._sessions.values() if history.head.tenant == tenant)
        return sorted(own, key=lambda history: (history.head.created, history.id))

    # --- changes: each gives back when it cannot be lost; None: at once -----------------

    def open(self, head: Head) -> History:
        """A new session. Nothing of it is kept before `keep_head`. Full."""
        self._make_room()
        history = self._sessions[head.id] = History(head)
        cost = self._costs[head.id] = history.cost
        self._bytes += cost
        return history

    def keep_head(self, history: History) -> Future[None] | None:
        self._use(history)
        return self._put(f"s:{history.id}", history.head) if self.has(history) else None

    def keep_turn(self, history: History, turn: Turn) -> Future[None] | None:
        return self._put(f"t:{history.id}:{turn.number}", turn) if self.has(history) else None

    def add(
        self,
        history: History,
        turn: Turn,
        *items: Item,
        step: int | None = None,
        told: tuple[str, ...] = (),
    ) -> Future[None] | None:
        number = history.batches[-1].number + 1 if history.batches else 1
        batch = Batch(number, turn.id, items, step, told)
        history.batches.append(batch)
        if not self.has(history):  # it was deleted while its turn ended
            return None
        cost = sum(map(item_cost, items))
        self._costs[history.id] += cost
        self._bytes += cost
        self._use(history)
        return self._put(f"i:{history.id}:{number}", batch)

    def owe(self, history: History, events: Iterable[Happened]) -> None:
        """They are about to happen, with what is kept next; and are to be told of."""
        before = len(history.owed)
        history.owed.update(dict.fromkeys(events))
        if len(history.owed) > before and self.has(history):
            self._put(f"e:{history.id}", Owed(tuple(history.owed)))

    def told(self, history: History, event: Happened) -> None:
        """It is owed no more."""
        if event not in history.owed:
            return
        del history.owed[event]
        if not self.has(history) or self._book is None:
            return
        if history.owed:
            self._put(f"e:{history.id}", Owed(tuple(history.owed)))
        else:
            self._book.drop(f"e:{history.id}")

    def drop(self, history: History) -> Future[None] | None:
        """Forget a session."""
        if self._sessions.pop(history.id, None) is None:
            return None
        self._bytes -= self._costs.pop(history.id)
        self.forget(history)
        if self._book is None:
            return None
        for batch in history.batches:
            self._book.drop(f"i:{history.id}:{batch.number}")
        for turn in history.turns:
            self._book.drop(f"t:{history.id}:{turn.number}")
        if history.owed:
            self._book.drop(f"e:{history.id}")
        return self._book.drop(f"s:{history.id}")

    def undo(self, history: History, turn: Turn) -> None:
        """A turn that could not begin."""
        if turn in history.turns:
            history.turns.remove(turn)
        for event in [event for event in history.owed if event[1] == turn.number]:
            self.told(history, event)
        gone = [batch for batch in history.batches if batch.turn == turn.id]
        for batch in gone:
            history.batches.remove(batch)
            cost = sum(map(item_cost, batch.items))
            if self.has(history):
                self._costs[history.id] -= cost
                self._bytes -= cost
        if self._book is not None:
            for batch in gone:
                self._book.drop(f"i:{history.id}:{batch.number}")
            self._book.drop(f"t:{history.id}:{turn.number}")

    def save_agent(self, agent: SavedAgent) -> Future[None] | None:
        mine = [id_ for id_, one in self.agents.items() if one.tenant == agent.tenant and id_ != agent.id]
        others = len(self.agents) - (agent.id in self.agents)
        content = packed(agent)
        held = sum(self._agent_costs.values()) - self._agent_costs.get(agent.id, 0) + len(content)
        own = sum(self._agent_costs[id_] for id_ in mine) + len(content)
        for most, kept, of_mine, what in (
            (self._bounds.agents, others + 1, len(mine) + 1, "agents"),
            (self._bounds.agents_bytes, held, own, "bytes of agents"),
        ):
            if of_mine > most - most // SPARE:
                raise Full(f"at most {most - most // SPARE} {what} of one tenant are kept")
            if kept > most:
                raise Full("there is no place for another agent")
        self._agent_costs[agent.id] = len(content)
        self.agents[agent.id] = agent
        return None if self._book is None else self._book.put(f"a:{agent.id}", content)

    def drop_agent(self, id_: str) -> Future[None] | None:
        del self.agents[id_], self._agent_costs[id_]
        return None if self._book is None else self._book.drop(f"a:{id_}")

    async def close(self) -> None:
        if self._book is not None:
            await self._book.close()

    # --- for a book --------------------------------------------------------------------

    def encoded(self, name: str) -> bytes | None:
        """A record as it is now."""
        kind, _, rest = name.partition(":")
        id_, _, number = rest.partition(":")
        if kind == "a":
            agent = self.agents.get(id_)
            return None if agent is None else packed(agent)
        history = self._sessions.get(id_)
        if history is None:
            return None
        if kind == "s":
            return packed(history.head)
        if kind == "e":
            return packed(Owed(tuple(history.owed))) if history.owed else None
        records = history.turns if kind == "t" else history.batches
        found = next((record for record in records if str(record.number) == number), None)
        return None if found is None else packed(found)

    def restore(self, records: Mapping[str, bytes]) -> int:
        """Take in what a book gives back; how many could not be read."""
        skipped = 0
        heads: dict[str, Head] = {}
        owed: dict[str, Owed] = {}
        turns: dict[str, list[Turn]] = {}
        batches: dict[str, list[Batch]] = {}
        for name, content in records.items():
            kind, _, rest = name.partition(":")
            id_ = rest.partition(":")[0]
            try:
                if kind == "a":
                    self.agents[id_] = _read(content, SavedAgent)
                    self._agent_costs[id_] = len(content)
                elif kind == "s":
                    heads[id_] = _read(content, Head)
                elif kind == "e":
                    owed[id_] = _read(content, Owed)
                elif kind == "t":
                    turns.setdefault(id_, []).append(_read(content, Turn))
                else:
                    batches.setdefault(id_, []).append(_read(content, Batch))
            except ValueError:
                skipped += 1
        for id_, head in sorted(heads.items(), key=lambda item: item[1].active):
            history = History(
                head,
                sorted(turns.get(id_, ()), key=lambda turn: turn.number),
                sorted(batches.get(id_, ()), key=lambda batch: batch.number),
                dict.fromkeys(owed[id_].events if id_ in owed else ()),
            )
            self._sessions[id_] = history
            cost = self._costs[id_] = history.cost
            self._bytes += cost
        return skipped

    # --- inside ------------------------------------------------------------------------

    def _put(self, name: str, record: Head | Turn | Batch | Owed) -> Future[None] | None:
        return None if self._book is None else self._book.put(name, packed(record))

    def _use(self, history: History) -> None:
        if history.id in self._sessions:
            self._sessions.move_to_end(history.id)

    def _make_room(self) -> None:
        while len(self._sessions) >= self._bounds.sessions or self._bytes > self._bounds.bytes:
            victim = self._first_to_go(by_bytes=self._bytes > self._bounds.bytes)
            if victim is None:
                raise Full("every session has a running turn")
            self.drop(victim)

    def _first_to_go(self, *, by_bytes: bool) -> History | None:
        """The longest unused of the tenant that has most: nobody's go for what another one keeps."""
        have: Counter[str] = Counter()
        idle: dict[str, History] = {}
        for history in self._sessions.values():
            have[history.head.tenant] += self._costs[history.id] if by_bytes else 1
            if history.active is None:
                idle.setdefault(history.head.tenant, history)
        return max(idle.values(), key=lambda history: have[history.head.tenant], default=None)


def _read(content: bytes, kind: type[Record]) -> Record:
    try:
        value = msgspec.json.decode(content)
    except msgspec.DecodeError:  # half a surrogate pair, or no JSON at all
        value = json.loads(content)
    return msgspec.convert(value, kind)
