"""From a turn's pieces to the response and the events of its stream. Pure.

Whole replies are made by the same fold, so they say what a stream says. An item is open until the next
one begins: reasoning, then text, then calls, then perhaps text again. Each event has the next number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from agentserve.messages import Token, TurnUsage
from agentserve.server.errors import ApiError
from agentserve.server.http.responses.item_fields import NewId
from agentserve.server.http.responses.mcp_events import (
    ARGUMENTS,
    McpEvents,
    Numbered,
    call_item,
    was_made,
)
from agentserve.server.http.responses.mcp_items import CALL, REQUEST
from agentserve.server.http.responses.shown import error_object, usage
from agentserve.server.http.responses.thoughts import packed
from agentserve.server.http.responses.tools import Toolbox
from agentserve.server.json_line import dump_json
from agentserve.server.sessions.answer import CallDelta, Delta, Outcome
from agentserve.server.text_port import JsonObject
from agentserve.types import FinishReason

_CALLS = ("function_call", CALL, REQUEST)
Logprobs = Callable[[Sequence[Token]], list[JsonObject]]


def event_frame(event: JsonObject) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode("ascii"), dump_json(event))


def end_of(response: JsonObject) -> str:
    """The kind of a response's last event. Cancelled ones have none of their own: readers wait for one of
    three."""
    status = response["status"]
    return f"response.{'incomplete' if status == 'cancelled' else status}"


class Fold:
    """One response as it is made. `response` is its object, always as of the last event."""

    def __init__(
        self,
        response: JsonObject,
        box: Toolbox,
        new_id: NewId,
        *,
        logprobs: Logprobs | None = None,
        packs_reasoning: bool = False,
    ) -> None:
        self.response = response
        self.over = False  # its end was told
        self._box = box
        self._new_id = new_id
        self._logprobs = logprobs
        self._packs = packs_reasoning
        self._output: list[JsonObject] = response["output"]
        self._open: JsonObject | None = None  # the last item, while it grows
        self._pieces: list[str] = []  # of its text
        self._probs: list[JsonObject] = []  # of its tokens
        self._broken = False  # it is a call that is not to be run
        self._reasoning = 0  # tokens
        self._turns: list[TurnUsage] = []  # of model calls that are over
        self._first = 0  # the place of the first item of the one under way
        self._event = Numbered()
        self.mcp = McpEvents(self._event, self._output, new_id)

    @property
    def sequence(self) -> int:
        """The number of the last event."""
        return self._event.last

    # --- the response ----------------------------------------------------------------

    def created(self, status: str = "in_progress") -> list[JsonObject]:
        self.response["status"] = status
        events = [self._told("response.created")]
        if status == "queued":
            events.append(self._told("response.queued"))
        return events

    def in_progress(self) -> list[JsonObject]:
        self.response["status"] = "in_progress"
        return [self._told("response.in_progress")]

    def tick(self) -> list[JsonObject]:
        """What was said last of the whole, again: some clients give up a stream that brings no events.
        Nothing where its end is all that is still to come."""
        status = self.response["status"]
        return [self._told(f"response.{status}")] if status in ("queued", "in_progress") else []

    def delta(self, piece: Delta) -> list[JsonObject]:
        """What became certain. Of calls and text in one piece, the rest of an open call comes first."""
        events: list[JsonObject] = []
        if piece.reasoning:
            events += self._reason(piece.reasoning)
        begun = next((i for i, call in enumerate(piece.calls) if call.id is not None), len(piece.calls))
        events += self._calls(piece.calls[:begun])
        if piece.text:
            events += self._say(piece.text, piece.tokens)
        events += self._calls(piece.calls[begun:])
        return events

    def finish(self, outcome: Outcome, now: int) -> list[JsonObject]:
        """The last items' ends. The response is complete then; `ended` tells so."""
        events = self.said(outcome)
        self.complete(outcome, now)
        return events

    def said(self, outcome: Outcome) -> list[JsonObject]:
        """A model call is over: the ends of its items, but for calls that this server makes now."""
        cut = outcome.reason is FinishReason.LENGTH
        events: list[JsonObject] = []
        if self._open is None and len(self._output) == self._first:
            events += self._say("", ())  # be it cut: the history has a reply there
        partial = cut
        if self._open is not None and self._open["type"] in _CALLS:
            partial = not outcome.calls[-1].complete
        events += self._close("incomplete" if partial else "completed")
        if not outcome.has_calls:
            events += self.mcp.cut_off(self._output)
        self._turns.append(outcome.usage)
        self._reasoning += outcome.reasoning_tokens
        self._first = len(self._output)
        self.response["usage"] = usage(self._turns, reasoning=self._reasoning)
        return events

    @property
    def generated(self) -> int:
        """Tokens, of all model calls that are over."""
        return sum(turn.generated for turn in self._turns)

    def complete(self, outcome: Outcome, now: int, *, cut: bool = False) -> None:
        """`outcome`: of the last model call; `cut`: another one would have too few tokens."""
        cut = cut or outcome.reason is FinishReason.LENGTH
        broken = any(not call.complete for call in outcome.calls)
        if cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        elif broken:
            self.response["incomplete_details"] = {"reason": "function_call_cut"}
        self._complete("incomplete" if cut or broken else "completed", now)

    def prewarmed(self, used: JsonObject, now: int) -> None:
        """Its prompt was computed; it says nothing."""
        self.response["usage"] = used
        self._complete("completed", now)

    def fail(self, error: ApiError) -> None:
        """What was said before is not part of any history."""
        self._drop()
        self.response["error"] = error_object(error)
        self.response["status"] = "failed"

    def cancel(self) -> list[JsonObject]:
        """The ends of calls that this server was making: they may have had their effects. What the model
        was saying is dropped."""
        self._open = None
        made = [item for place, item in enumerate(self._output) if place < self._first or was_made(item)]
        events = self.mcp.cut_off(made)
        self._output[:] = made
        self.response["status"] = "cancelled"
        return events

    def ended(self) -> list[JsonObject]:
        """The last event of the stream, once."""
        if self.over:
            return []
        self.over = True
        return [self._told(end_of(self.response))]

    def last(self) -> list[JsonObject]:
        """The event that `ended` told, again; nothing where it has not told it."""
        if not self.over:
            return []
        end: JsonObject = {"type": end_of(self.response), "sequence_number": self.sequence}
        return [{**end, "response": self.response}]

    def again(self, item: JsonObject) -> list[JsonObject]:
        """The events of an item that was made before, its text in one piece."""
        kind = item["type"]
        if kind.startswith("mcp_"):
            return self.mcp.again(item)
        bare = {**item, "arguments": ""} if kind == "function_call" else {**item, "content": []}
        if kind == "reasoning":
            text = "".join(part["text"] for part in item.get("content") or ())
            events = self._begin(bare)
            return events + self._reason(text) + self._close("completed")
        events = self._begin({**bare, "status": "in_progress"})
        if kind == "function_call":
            self._pieces.append(item["arguments"])
            events.append(self._of_item("response.function_call_arguments.delta", delta=item["arguments"]))
        else:
            text = "".join(part["text"] for part in item["content"])
            self._probs = [probs for part in item["content"] for probs in part.get("logprobs") or ()]
            part: JsonObject = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            events.append(self._of_part("response.content_part.added", part=part))
            self._pieces.append(text)
            if text:
                delta = self._of_part("response.output_text.delta", delta=text, logprobs=list(self._probs))
                events.append(delta)
        return events + self._close(item["status"])

    def _complete(self, status: str, now: int) -> None:
        self.response["status"] = status
        if status == "completed":
            self.response["completed_at"] = now

    def _drop(self) -> None:
        self._open = None
        self._output.clear()

    # --- items -----------------------------------------------------------------------

    def _reason(self, text: str) -> list[JsonObject]:
        events: list[JsonObject] = []
        if self._open is None or self._open["type"] != "reasoning":
            item: JsonObject = {"id": self._new_id("rs"), "type": "reasoning", "summary": [], "content": []}
            events += self._begin(item)
        self._pieces.append(text)
        events.append(self._of_part("response.reasoning_text.delta", delta=text))
        return events

    def _say(self, text: str, tokens: Sequence[Token]) -> list[JsonObject]:
        events: list[JsonObject] = []
        if self._open is None or self._open["type"] != "message":
            item: JsonObject = {
                "id": self._new_id("msg"),
                "type": "message",
                "status": "in_progress",
                "role": "assistant",
                "content": [],
            }
            events += self._begin(item)
            part: JsonObject = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            events.append(self._of_part("response.content_part.added", part=part))
        probs = self._logprobs(tokens) if self._logprobs is not None else []
        self._pieces.append(text)
        self._probs += probs
        if text:
            events.append(self._of_part("response.output_text.delta", delta=text, logprobs=probs))
        return events

    def _calls(self, calls: Iterable[CallDelta]) -> list[JsonObject]:
        events: list[JsonObject] = []
        for call in calls:
            if call.id is not None:
                events += self._begin(call_item(self._box, call, self._new_id, len(self._turns)))
            if call.arguments:
                self._pieces.append(call.arguments)
                kind = ARGUMENTS.get((self._open or {}).get("type", ""))
                if kind is not None:
                    events.append(self._of_item(f"{kind}.delta", delta=call.arguments))
            self._broken = call.broken
        return events

    def _begin(self, item: JsonObject) -> list[JsonObject]:
        events = self._close("incomplete" if self._broken else "completed")
        self._open = item
        self._pieces, self._probs, self._broken = [], [], False
        return events + self.mcp.begin(item)

    def _close(self, status: str) -> list[JsonObject]:
        """The open item's text is whole."""
        item = self._open
        if item is None:
            return []
        text = "".join(self._pieces)
        events = self._last_words(item, text)
        self._open = None
        if item["type"] == REQUEST:
            return self.mcp.whole(item)
        if item["type"] == CALL and status == "completed":
            return events  # until it has its result
        if item["type"] == "reasoning":
            item["content"] = [{"type": "reasoning_text", "text": text}]
            if self._packs:
                item["encrypted_content"] = packed(text)
        else:
            item["status"] = status
        return [*events, self.mcp.done(item)]

    def _last_words(self, item: JsonObject, text: str) -> list[JsonObject]:
        if item["type"] == "reasoning":
            return [self._of_part("response.reasoning_text.done", text=text)]
        if item["type"] in _CALLS:
            item["arguments"] = text
            if item["type"] != "function_call":
                return (
                    []
                    if item["type"] == REQUEST
                    else [self._of_item(f"{ARGUMENTS[CALL]}.done", arguments=text)]
                )
            return [self._of_item("response.function_call_arguments.done", name=item["name"], arguments=text)]
        part: JsonObject = {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": list(self._probs),
        }
        item["content"] = [part]
        return [
            self._of_part("response.output_text.done", text=text, logprobs=list(self._probs)),
            self._of_part("response.content_part.done", part=dict(part)),
        ]

    # --- events ----------------------------------------------------------------------

    def _told(self, kind: str) -> JsonObject:
        """An event with the response as it is."""
        return self._event(kind, response={**self.response, "output": [_copy(i) for i in self._output]})

    def _of_part(self, kind: str, **fields: object) -> JsonObject:
        return self._of_item(kind, content_index=0, **fields)

    def _of_item(self, kind: str, **fields: object) -> JsonObject:
        assert self._open is not None
        return self._event(kind, item_id=self._open["id"], output_index=len(self._output) - 1, **fields)


def _copy(item: JsonObject) -> JsonObject:
    """Of an item that may still grow: its fields are replaced, never changed."""
    return dict(item)
