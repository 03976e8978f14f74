"""What happens in agents' sessions, as the events of the Agents API: numbered, kept for readers who come
and go, bounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentserve.server.agents.fold import Closed, Grew, Opened, Step
from agentserve.server.agents.history import History
from agentserve.server.agents.records import (
    CallItem,
    Failure,
    Happened,
    Item,
    MessageItem,
    ReasoningItem,
    Turn,
)
from agentserve.server.http.agents.shown import (
    is_shown,
    item_object,
    session_object,
    turn_object,
    usage_object,
)
from agentserve.server.sessions.events import EventLog, EventLogs
from agentserve.server.text_port import JsonObject
from agentserve.server.webhooks.payloads import ACTION_REQUIRED, session_data, thin_action
from agentserve.types import SessionId

Publish = Callable[[str, str, JsonObject, Sequence[str | int], Callable[[], None]], None]
"""An event to whoever wants it: the tenant, the type, what it is about, its names, and what to do when it
cannot be lost any more."""

LOG_BYTES = 4 << 20  # of one session; an event may show all of its tools
MAX_BYTES = 128 << 20
SESSION, TURN = "agent.session", "agent.session.turn"


class Telling:
    """A `Teller`."""

    def __init__(self, new_name: Callable[[], str]) -> None:
        self.publish: Publish = lambda tenant, kind, data, names, kept: None  # to webhooks
        self.wanted: Callable[[str, str], bool] = lambda tenant, kind: False  # by them
        self.told: Callable[[History, Happened], None] = lambda history, event: None  # they have it
        self.logs = EventLogs(new_name, log_bytes=LOG_BYTES, max_bytes=MAX_BYTES)

    def log_of(self, history: History) -> EventLog:
        return self.logs.of(SessionId(history.id), goes_on=bool(history.turns))

    def forget(self, history: History) -> None:
        """Readers get what is there, and then the end."""
        self.logs.forget(SessionId(history.id))

    # --- sessions and turns ------------------------------------------------------------

    def created(self, history: History) -> None:
        self._session(history, "created")

    def turn_created(self, history: History, turn: Turn) -> None:
        self._turn(history, turn, "created")

    def in_progress(self, history: History, turn: Turn, *, again: bool = False) -> None:
        self._session(history, "in_progress")
        if not again:
            self._turn(history, turn, "in_progress")
            self._published(history, ("in_progress", turn.number))

    def requires_action(self, history: History) -> None:
        if any(call.kind == "function" for call in history.required()):  # others are delivered one by one
            turn = history.turns[-1]
            names = (history.id, turn.number, history.replies(turn))
            self.publish(history.head.tenant, ACTION_REQUIRED, thin_action(history.id), names, _done)
        self._session(history, "requires_action")

    def ended(self, history: History, turn: Turn) -> None:
        if turn.error is not None:
            self._say(history, "error", error=_error(turn.error), session_id=history.id)
        self._turn(history, turn, turn.status, usage=usage_object(turn.usage))
        self._session(history, "idle")
        self._published(history, ("failed", turn.number))
        self._published(history, ("idle", turn.number))

    def kept(self, history: History) -> None:
        """A new session is there to stay."""
        self._published(history, ("created", 0))

    def wants(self, history: History, event: Happened) -> bool:
        return self.wanted(history.head.tenant, f"{SESSION}.{event[0]}")

    def catch_up(self, history: History) -> None:
        """Tell webhooks what an earlier server owed them."""
        for event in list(history.owed):
            if history.happened(event):
                self._published(history, event)
            else:
                self.told(history, event)  # it happens yet, or never will

    def _published(self, history: History, event: Happened) -> None:
        if event not in history.owed:
            return
        kind, number = event
        self.publish(
            history.head.tenant,
            f"{SESSION}.{kind}",
            session_data(history.id),
            (history.id, number),
            lambda: self.told(history, event),
        )

    # --- items -------------------------------------------------------------------------

    def steps(self, history: History, turn: Turn, steps: Sequence[Step]) -> None:
        for step in steps:
            if isinstance(step, Opened):
                self._opened(history, turn, step)
            elif isinstance(step, Grew):
                self._grew(history, turn, step)
            else:
                self._closed(history, turn, step)

    def added(self, history: History, turn: Turn, item: Item) -> None:
        if is_shown(history, item):
            self._item(history, turn, "added", self._shown(history, turn, item))

    def call_done(self, history: History, turn: Turn, call: str) -> None:
        index = 0
        for item, of in history.items(turn.id):
            if isinstance(item, CallItem) and item.call == call:
                shown = item_object(item, of, history.outputs(), over=turn.over)
                self._item(history, turn, "done", shown, output_index=index)
            index += isinstance(item, CallItem | MessageItem | ReasoningItem)

    def _opened(self, history: History, turn: Turn, step: Opened) -> None:
        item = step.item
        begun = not isinstance(item, CallItem)
        shown = self._shown(history, turn, item, begun=begun)
        self._item(history, turn, "added", shown, output_index=step.index)
        if isinstance(item, MessageItem):
            self._part(history, turn, step, "content_part.added", part=_text(""))
        elif begun:
            self._part(history, turn, step, "reasoning_summary_part.added", part=_thought(""))

    def _grew(self, history: History, turn: Turn, step: Grew) -> None:
        kind = "output_text" if isinstance(step.item, MessageItem) else "reasoning_summary_text"
        self._part(history, turn, step, f"{kind}.delta", delta=step.text)

    def _closed(self, history: History, turn: Turn, step: Closed) -> None:
        item = step.item
        if isinstance(item, MessageItem):
            self._part(history, turn, step, "output_text.done", text=item.text)
            self._part(history, turn, step, "content_part.done", part=_text(item.text))
        else:
            self._part(history, turn, step, "reasoning_summary_text.done", text=item.text)
            cut: JsonObject = {} if item.whole else {"status": "incomplete"}
            self._part(history, turn, step, "reasoning_summary_part.done", part=_thought(item.text), **cut)
        shown = self._shown(history, turn, item)
        self._item(history, turn, "done", shown, output_index=step.index)

    @staticmethod
    def _shown(history: History, turn: Turn, item: Item, *, begun: bool = False) -> JsonObject:
        return item_object(item, turn.id, {}, over=turn.over, begun=begun)

    # --- one event ---------------------------------------------------------------------

    def _session(self, history: History, kind: str) -> None:
        self._say(history, f"{SESSION}.{kind}", session=session_object(history))

    def _turn(self, history: History, turn: Turn, kind: str, **more: object) -> None:
        shown = turn_object(history, turn)
        self._say(history, f"{TURN}.{kind}", session_id=history.id, turn_id=turn.id, turn=shown, **more)

    def _item(self, history: History, turn: Turn, kind: str, item: JsonObject, **more: object) -> None:
        self._say(history, f"{TURN}.item.{kind}", session_id=history.id, turn_id=turn.id, item=item, **more)

    def _part(
        self, history: History, turn: Turn, step: Opened | Grew | Closed, kind: str, **more: object
    ) -> None:
        place = "content_index" if isinstance(step.item, MessageItem) else "summary_index"
        self._say(
            history,
            f"{TURN}.{kind}",
            session_id=history.id,
            turn_id=turn.id,
            item_id=step.item.id,
            output_index=step.index,
            **{place: 0},
            **more,
        )

    def _say(self, history: History, kind: str, **fields: object) -> None:
        log = self.log_of(history)
        event: JsonObject = {"type": kind, "event_id": event_id(log, log.last + 1), **fields}
        self.logs.publish(SessionId(history.id), kind, event)


def _done() -> None:
    """A turn that waits for its client says so again in the next server."""


def event_id(log: EventLog, number: int) -> str:
    return f"{log.name}-{number}"


def _text(text: str) -> JsonObject:
    return {"type": "output_text", "text": text}


def _thought(text: str) -> JsonObject:
    return {"type": "summary_text", "text": text}


def _error(failure: Failure) -> JsonObject:
    kind = "server_error" if failure.code in ("server_error", "internal_error") else "invalid_request_error"
    return {"code": failure.code, "message": failure.message, "param": None, "type": kind}
