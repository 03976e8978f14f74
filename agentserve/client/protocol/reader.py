"""One turn, read from events that may be cut off, repeated or lost: what is told to the caller, in order,
each thing once, and which calls are to be run. Pure.

Events say how items grow; lists say what items there are. Both meet in the ids of items. What was told of an
item never changes, with one exception: when the server dies over an item that it had not finished, what was
said of it is void, and `Resynced` says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from agentserve.client.protocol import events as told
from agentserve.client.protocol.errors import BadReply
from agentserve.client.protocol.events import Call, Event
from agentserve.client.protocol.flow import JsonObject

MOST_SEEN = 1024  # ids of events by which one that comes twice is known
LOST = "events_lost"
_PREFIX = "agent.session."
_ENDS = frozenset({"turn.completed", "turn.failed", "turn.cancelled"})
OVER = frozenset({"completed", "failed", "cancelled"})
_NOTHING_NEW = frozenset(
    {
        "created",
        "in_progress",
        "turn.in_progress",
        "turn.content_part.added",
        "turn.content_part.done",
        "turn.reasoning_summary_part.added",
        "turn.reasoning_summary_part.done",
    }
)


@dataclass(frozen=True, slots=True)
class Run:
    """A call that the client is to run."""

    call: Call


class Resync:
    """Something was lost: list session, turn and items, and give them to `resync`."""


Step = Event | Run | Resync


@dataclass(slots=True)
class _Growing:
    """An item that is not done, and what of it the caller was told."""

    reasoning: bool
    said: list[str] = field(default_factory=list)
    behind: bool = False  # something in between was lost: the rest is told when it is whole


class TurnReader:
    """`turn`: its id; None: the next turn that begins. What comes before it begins is passed over."""

    def __init__(self, turn: str | None = None, background: Collection[str] = ()) -> None:
        """`background`: tools whose calls are never required: they are to be run when they are told."""
        self.turn = turn
        self._background = background
        self._started = False
        self.ended: told.TurnEnded | None = None
        self._items: dict[str, JsonObject] = {}  # that are done, in order: by id, or by call
        self._growing: dict[str, _Growing] = {}
        self._run: set[str] = set()
        self._called: set[str] = set()
        self._asked: set[str] = set()
        self._seen: set[str] = set()
        self._order: deque[str] = deque()

    # --- events ------------------------------------------------------------------------

    def read(self, event: JsonObject) -> Iterator[Step]:
        """What an event comes to. BadReply."""
        if self.ended is not None or self._known(event.get("event_id")):
            return
        try:
            yield from self._read(str(event["type"]), event)
        except (KeyError, TypeError, AttributeError) as error:
            raise BadReply(f"an event {event.get('type')!r} without {error}") from None

    def _known(self, id_: object) -> bool:
        if not isinstance(id_, str):
            return False
        if id_ in self._seen:
            return True
        self._seen.add(id_)
        self._order.append(id_)
        if len(self._order) > MOST_SEEN:
            self._seen.discard(self._order.popleft())
        return False

    def _read(self, type_: str, event: JsonObject) -> Iterator[Step]:
        kind = type_.removeprefix(_PREFIX)
        if type_ == "error":
            error = event["error"]
            if error.get("code") == LOST:
                yield Resync()
            elif self._started:
                yield told.ErrorTold(error.get("code"), str(error.get("message")))
        elif kind == "turn.created" and not self._started and self.turn in (None, event["turn_id"]):
            yield from self._begun(event["turn_id"])
        elif kind in ("requires_action", "idle", "failed"):
            yield from self._session(kind, event["session"])
        elif not self._started or event.get("turn_id") not in (self.turn, None) or kind in _NOTHING_NEW:
            return
        elif kind in _ENDS:
            yield from self._end(event["turn"], event.get("usage"))
        elif kind in ("turn.item.added", "turn.item.done"):
            yield from self._item(event["item"], done=kind.endswith("done"))
        elif kind in ("turn.output_text.delta", "turn.reasoning_summary_text.delta"):
            yield from self._delta(event["item_id"], event["delta"], kind.startswith("turn.reason"))
        elif kind in ("turn.output_text.done", "turn.reasoning_summary_text.done"):
            yield from self._whole(event["item_id"], event["text"], kind.startswith("turn.reason"))
        elif kind != "turn.created":
            yield told.Other(type_, event)

    def _begun(self, turn: str) -> Iterator[Step]:
        self.turn, self._started = turn, True
        yield told.TurnStarted(turn)

    def _session(self, kind: str, session: JsonObject) -> Iterator[Step]:
        if not self._started:
            return
        if kind == "requires_action":
            yield from self._required(session)
        else:
            yield Resync()  # it rests, and the end of the turn was not told

    def _required(self, session: JsonObject) -> Iterator[Step]:
        for call in told.required_of(session):
            if call.turn == self.turn:
                yield from self._call(call)
                yield from self._to_run(call)
        for asked in told.approvals_of(session, self.turn or ""):
            if asked.request not in self._asked:
                self._asked.add(asked.request)
                yield asked

    def _to_run(self, call: Call) -> Iterator[Step]:
        if call.id not in self._run:
            self._run.add(call.id)
            yield Run(call)

    def _call(self, call: Call) -> Iterator[Step]:
        if call.id not in self._called:
            self._called.add(call.id)
            yield told.ToolCalled(call)

    def _end(self, turn: JsonObject, usage: object) -> Iterator[Step]:
        error = turn.get("error") or {}
        used = told.Usage.of(usage or turn.get("usage"))
        self.ended = told.TurnEnded(turn["id"], turn["status"], used, error.get("code"), error.get("message"))
        yield self.ended

    # --- items -------------------------------------------------------------------------

    def _item(self, item: JsonObject, *, done: bool) -> Iterator[Step]:
        id_, type_ = item["id"], item["type"]
        if type_ == "function_call":
            key = f"call {item['call_id']}"
            if done or key not in self._items:  # its place is where it was called
                self._items[key] = item
            call = Call(item["call_id"], item["name"], item["arguments"], item["turn_id"])
            yield from self._call(call)
            if call.name in self._background and item.get("status") == "in_progress":
                yield from self._to_run(call)
        elif type_ == "function_call_output":
            key = f"output {item['call_id']}"
            again, self._items[key] = key in self._items, item
            if again:  # by another id, where the server died before this one was on its disk
                return
            yield told.ToolReturned(item["call_id"], item.get("output"), item.get("error"))
        elif id_ in self._items:
            return
        elif item.get("role") == "user" or type_ not in ("message", "reasoning"):
            self._items[id_] = item
        elif not done:
            self._growing.setdefault(id_, _Growing(type_ == "reasoning"))
        else:
            text, reasoning = told.text_of(item), type_ == "reasoning"
            yield from self._whole(id_, text, reasoning)
            self._growing.pop(id_, None)
            self._items[id_] = item
            if reasoning:
                yield told.Reasoning(id_, text)
            else:
                yield told.Message(id_, text, item.get("phase") == "final_answer")

    def _delta(self, id_: str, text: str, reasoning: bool) -> Iterator[Step]:
        if id_ in self._items:
            return
        growing = self._growing.get(id_)
        if growing is None:  # it was begun among what is lost
            growing = self._growing[id_] = _Growing(reasoning, behind=True)
        if not growing.behind:
            growing.said.append(text)
            yield _delta(id_, text, reasoning)

    def _whole(self, id_: str, text: str, reasoning: bool) -> Iterator[Step]:
        """All of an item's text is there: tell what was not told."""
        if id_ in self._items:
            return
        growing = self._growing.setdefault(id_, _Growing(reasoning))
        said = "".join(growing.said)
        if not text.startswith(said):
            raise BadReply(f"item {id_} has another text than its deltas")
        if len(said) < len(text):
            growing.said.append(text[len(said) :])
            yield _delta(id_, text[len(said) :], reasoning)

    # --- what was lost -----------------------------------------------------------------

    def resync(
        self, session: JsonObject, turn: JsonObject, items: Sequence[JsonObject], *, same_server: bool
    ) -> Iterator[Step]:
        """Go on from what lists say. `same_server`: an item that it was making when events were lost is still
        being made; otherwise it died with its server. BadReply."""
        try:
            yield from self._resync(session, turn, items, same_server)
        except (KeyError, TypeError, AttributeError) as error:
            raise BadReply(f"a list without {error}") from None

    def _resync(
        self, session: JsonObject, turn: JsonObject, items: Sequence[JsonObject], same_server: bool
    ) -> Iterator[Step]:
        if not self._started:
            yield from self._begun(turn["id"])
        for item in items:
            done = item.get("status") != "in_progress"
            yield from self._item(item, done=done)
        over = turn["status"] in OVER
        dropped = tuple(self._growing) if over or not same_server else ()
        for id_ in dropped:
            del self._growing[id_]
        for growing in self._growing.values():
            growing.behind = True
        yield told.Resynced(dropped)
        if over:
            yield from self._end(turn, turn.get("usage"))
        else:
            yield from self._required(session)

    # --- in the end --------------------------------------------------------------------

    def result(self) -> told.TurnResult:
        end = self.ended
        assert end is not None, "the turn is not over"
        items = tuple(self._items.values())
        said = [item for item in items if item["type"] == "message" and item.get("role") == "assistant"]
        final = [item for item in said if item.get("phase") == "final_answer"] or said[-1:]
        text = "".join(told.text_of(item) for item in final)
        return told.TurnResult(end.turn, end.status, text, end.usage, items, end.code, end.message)


def _delta(id_: str, text: str, reasoning: bool) -> told.TextDelta | told.ReasoningDelta:
    return told.ReasoningDelta(id_, text) if reasoning else told.TextDelta(id_, text)
