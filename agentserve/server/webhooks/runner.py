"""Calls of webhook tools: delivered to an endpoint, which answers at once or posts the result later."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import NoReturn

from agentserve.server.agents.history import History
from agentserve.server.agents.records import CallItem
from agentserve.server.agents.runners import FAILED, ToolCall, ToolOutcome
from agentserve.server.sessions.transcript import write_json
from agentserve.server.webhooks.hooks import Hooks
from agentserve.server.webhooks.payloads import (
    ACTION_REQUIRED,
    FULL,
    event,
    event_id_of,
    full_action,
    thin_action,
)
from tools_bridge.webhooks.callback import Call
from tools_bridge.webhooks.types import (
    Conflict,
    Delivered,
    EndpointDisabled,
    EventTooLarge,
    Key,
    NotKept,
    OutboxFull,
    ToolResult,
    UnknownEndpoint,
    WebhookError,
    Why,
)

_NOT_SENT: dict[type[WebhookError], str] = {
    UnknownEndpoint: "The tool's webhook does not exist any more.",
    EndpointDisabled: "The tool's webhook is disabled.",
    EventTooLarge: "The arguments are too long for the tool's webhook.",
    OutboxFull: "Too many webhook calls are pending. Try again later.",
    Conflict: FAILED,
    NotKept: "The tool could not be called: the server cannot keep the call.",
}
_GAVE_UP = {
    Why.DEADLINE: "The tool's webhook did not take the call in time.",
    Why.EXHAUSTED: "The tool's webhook did not take the call.",
    Why.CIRCUIT_OPEN: "The tool's webhook keeps failing, and was not called.",
    Why.ADDRESS_REFUSED: "The address of the tool's webhook may not be called.",
    Why.BAD_REPLY: "The tool's webhook answered with what is no result.",
    Why.ENDPOINT_DISABLED: "The tool's webhook is disabled.",
    Why.ENDPOINT_DELETED: "The tool's webhook does not exist any more.",
    Why.WITHDRAWN: "The call was withdrawn.",
}
_TEXTS = ("input_text", "output_text", "text")


class WebhookTools:
    """A `ToolRunner`."""

    lasting = True  # the outbox, or its receiver, has the call

    def __init__(self, hooks: Hooks, most_wait: float) -> None:
        """`most_wait`: seconds that a call may take where its tool says nothing."""
        self._hooks = hooks
        self._most_wait = most_wait

    async def run(self, call: ToolCall) -> ToolOutcome:
        hooks, item = self._hooks, call.item
        id_ = event_id_of(call)
        deadline = hooks.now() + self._most_wait if item.deadline is None else item.deadline
        try:
            key = hooks.owed(id_) or Key(hooks.named(call.owner, item.webhook or "").id, id_)
            ending = await hooks.deliver(key, ACTION_REQUIRED, lambda: self._body(key, call), deadline)
        except WebhookError as error:
            return ToolOutcome(error=_NOT_SENT.get(type(error), FAILED))
        if not isinstance(ending, Delivered):
            return ToolOutcome(error=_GAVE_UP[ending.why])
        if ending.result is None:
            hooks.courier.acknowledge(key)  # there is no more to hear of it
            await _forever()
        return outcome_of(ending.result)

    def settled(self, call: ToolCall) -> None:
        self._hooks.settled(event_id_of(call))

    def wanted(self, histories: Iterable[History]) -> set[str]:
        """Events of the calls that wait for a result, as the records have them."""
        return {
            event_id_of(ToolCall(history.id, turn.id, item, history.head.tenant, turn.number))
            for history in histories
            if (turn := history.active) is not None
            for item in history.open_calls(turn)
            if item.kind == "webhook"
        }

    def _body(self, key: Key, call: ToolCall) -> bytes:
        data = thin_action(call.session)
        if self._hooks.ledger.endpoint(key.endpoint).form == FULL:
            token = self._hooks.tokens.issue(callback_of(call.session, call.item, call.number))
            ends = None if call.item.deadline is None else self._hooks.courier.unix(call.item.deadline)
            data = full_action(call, self._hooks.callback_url(token), ends)
        return event(key.event, ACTION_REQUIRED, self._hooks.wall(), data)


def callback_of(session: str, item: CallItem, turn: int) -> Call:
    """What a callback's token is for: a call of one turn, and no other of its name."""
    return Call(session, item.call, turn)


def outcome_of(result: ToolResult) -> ToolOutcome:
    if not result.success:
        return ToolOutcome(error=result.error or FAILED)
    output = result.output
    if isinstance(output, str):
        return ToolOutcome(output)
    texts = [part.get("text") for part in output if part.get("type") in _TEXTS]
    if len(texts) == len(output) and all(isinstance(text, str) for text in texts):
        return ToolOutcome([{"type": "text", "text": text} for text in texts])
    return ToolOutcome(write_json(output).decode())


async def _forever() -> NoReturn:
    """Until somebody brings the result, or the time is over: then this is cancelled."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError("nobody ends it")
