"""What a request comes to, before anything runs: its whole history, and the chat turn that follows it."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentserve.server.errors import ApiError
from agentserve.server.http.context import ServerContext
from agentserve.server.http.left_out import listed
from agentserve.server.http.responses.asked import chat_request, messages_of
from agentserve.server.http.responses.conversations import Conversation, Entry, shown
from agentserve.server.http.responses.desk import Desk, new_id
from agentserve.server.http.responses.hold import Hold
from agentserve.server.http.responses.items import read_input
from agentserve.server.http.responses.mcp_items import undone
from agentserve.server.http.responses.mcp_plan import check_approvals, with_servers
from agentserve.server.http.responses.references import not_found, resolved
from agentserve.server.http.responses.schemas import ResponsesRequest
from agentserve.server.http.responses.shelf import Kept
from agentserve.server.http.responses.thoughts import Room
from agentserve.server.http.responses.tools import Toolbox, read_choice, read_tools
from agentserve.server.http.schemas import ChatRequest
from agentserve.server.http.tool_choice import NOT_OFFERED, not_offered
from agentserve.server.text_port import JsonObject

log = logging.getLogger(__name__)

MOST_METADATA = 16
_MOST_KEY, _MOST_VALUE = 64, 512
_MESSAGE = re.compile(r"messages\[(\d+)\](?:\.tool_calls(?:\[\d+\](?:\.\w+)*)?)?")
_TOOL = re.compile(r"tools\[(\d+)\]\.function")
_NAMES = (  # of chat completions, and of this dialect
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    ("messages", "input"),
)
_RESULT_OF = "].tool_call_id", "].call_id"


@dataclass(slots=True)
class Plan:
    body: ResponsesRequest
    box: Toolbox
    items: list[JsonObject]  # the request's own
    places: list[str]
    fields: ChatRequest
    where: tuple[str | None, ...]  # of each message, its place in the request
    hold: Hold
    earlier: list[list[JsonObject]]  # runs of items that were there before
    listings: list[JsonObject]  # items: tools of MCP servers that were asked for them now
    approved: list[JsonObject]  # requests for approval whose calls are to be made now

    @property
    def parent(self) -> Kept | None:
        return self.hold.chain[-1] if self.hold.chain else None

    @property
    def conversation(self) -> Conversation | None:
        return self.hold.conversation

    @property
    def keeps(self) -> bool:
        """Something of it is to be found afterwards."""
        return self.body.stored or self.conversation is not None

    def told(self, error: ApiError) -> ApiError:
        """An error about a chat request as one about the request that it was made of."""
        if error.code == "missing_tool_result":
            problem = error.message.partition(": ")[2].partition(";")[0]
            message = f"input: {problem}; put a function_call_output for it into the input, at any place"
            return ApiError(message, status=error.status, param="input", code=error.code)
        left_out = not_offered(self.box.skipped) if error.code == NOT_OFFERED else ""
        return ApiError(
            self._ours(error.message) + left_out,
            status=error.status,
            param=None if error.param is None else self._ours(error.param),
            code=error.code,
            headers=error.headers,
            details=error.details,
        )

    def _ours(self, text: str) -> str:
        def item(found: re.Match[str]) -> str:
            index = int(found.group(1))
            return (self.where[index] if index < len(self.where) else None) or "an earlier item"

        def tool(found: re.Match[str]) -> str:
            index = int(found.group(1))
            return self.box.places[index] if index < len(self.box.places) else found.group()

        text = _TOOL.sub(tool, _MESSAGE.sub(item, text).replace(*_RESULT_OF))
        for chat, ours in _NAMES:
            if text.startswith(chat):
                return ours + text.removeprefix(chat)
        return text


async def planned(context: ServerContext, tenant: str, body: ResponsesRequest, *, lock: bool = True) -> Plan:
    """ApiError for what cannot be, or names what there is not. `lock`: the hold is to be released."""
    check(body)
    hold = Hold(context.responses, tenant, body, lock=lock)
    try:
        return await _read(context, body, hold)
    except BaseException:
        hold.release()
        raise


async def _read(context: ServerContext, body: ResponsesRequest, hold: Hold) -> Plan:
    desk, limits = context.responses, context.options.limits
    box = read_tools(body.tools)
    given = await context.off_loop(read_input, body.input, new_id, most=limits.messages)
    if box.skipped or given.skipped:
        log.warning("responses: tools and items are skipped: %s", listed([*box.skipped, *given.skipped]))
    conversation = hold.conversation
    if conversation is not None:
        earlier = [await context.off_loop(shown, conversation.entries())]
    else:
        _check_size(hold.chain, limits.history_bytes)
        earlier = await context.off_loop(runs_of, hold.chain, conversations_of(desk, hold.chain))
    known = {item["id"] for run in earlier for item in run}
    room = Room(limits.expanded_bytes)
    once = conversation is not None
    items, places = await resolved(context, hold.tenant, given, known, room, once=once)
    said = [item for run in earlier for item in run]
    check_approvals(said, items, places)
    box, listings = await with_servers(context, hold.tenant, box, [*said, *items])
    choice = read_choice(body.tool_choice, box)
    messages, where = await messages_for(context, box, body, [*earlier, items], places, room=room)
    last = hold.session
    alive = last is not None and context.directory.get(hold.tenant, last) is not None
    fields = chat_request(body, box, choice, messages, last if alive else None)
    approved = undone([*said, *items])
    return Plan(body, box, items, places, fields, where, hold, earlier, listings, approved)


def check(body: ResponsesRequest) -> None:
    """What a body alone says wrong."""
    if body.previous_response_id is not None and body.conversation is not None:
        raise ApiError(
            "previous_response_id: cannot be used together with conversation", param="previous_response_id"
        )
    if body.prompt is not None:
        raise ApiError(
            "prompt: stored prompts are not supported; send their text as instructions and input",
            param="prompt",
            code="unsupported_parameter",
        )
    if body.background and not body.stored:
        raise ApiError("background: needs store true", param="background")
    if body.truncation not in (None, "auto", "disabled"):
        raise ApiError("truncation: must be auto or disabled", param="truncation")
    if body.max_tool_calls is not None and body.max_tool_calls < 0:
        raise ApiError("max_tool_calls: must be 0 or more", param="max_tool_calls", code="invalid_value")
    check_metadata(body.metadata)


def check_metadata(metadata: dict[str, str] | None) -> None:
    if metadata is None:
        return
    if len(metadata) > MOST_METADATA:
        raise ApiError(f"metadata: at most {MOST_METADATA} keys", param="metadata")
    for key, value in metadata.items():
        if len(key) > _MOST_KEY or len(value) > _MOST_VALUE:
            raise ApiError(
                f"metadata: keys have at most {_MOST_KEY} characters, values {_MOST_VALUE}", param="metadata"
            )


def _check_size(chain: Sequence[Kept], most: int) -> None:
    if sum(kept.cost for kept in chain) > most:
        raise ApiError(
            f"previous_response_id: the history has more than {most} bytes",
            status=413,
            param="previous_response_id",
            code="history_too_large",
        )


def conversations_of(desk: Desk, chain: Sequence[Kept]) -> dict[str, tuple[Entry, ...]]:
    """The items of those that responses of a chain were made in. ApiError where one is gone."""
    found: dict[str, tuple[Entry, ...]] = {}
    for id_ in dict.fromkeys(kept.conversation for kept in chain if kept.conversation is not None):
        conversation = desk.conversations.get(id_)
        if conversation is None:
            raise not_found("Conversation", id_, code="conversation_not_found")
        found[id_] = conversation.entries()
    return found


def runs_of(chain: Sequence[Kept], conversations: Mapping[str, Sequence[Entry]]) -> list[list[JsonObject]]:
    """The items of a chain of responses, a run for each input and each output: the last is its output."""
    runs: list[list[JsonObject]] = []
    for kept in chain:
        if kept.conversation is not None:
            runs.append(shown([e for e in conversations[kept.conversation] if e.number < kept.upto]))
        runs += [kept.own_items(), kept.output()]
    return runs


async def messages_for(
    context: ServerContext,
    box: Toolbox,
    body: ResponsesRequest,
    runs: list[list[JsonObject]],
    places: list[str],
    *,
    room: Room,
) -> tuple[list[JsonObject], tuple[str | None, ...]]:
    """The messages of items, and where each is in the request: `places` are those of the last items."""
    messages, firsts = await context.off_loop(messages_of, runs, room, box.remote_names)
    earlier = sum(map(len, runs)) - len(places)
    where: list[str | None] = [places[first - earlier] if first >= earlier else None for first in firsts]
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
        where.insert(0, "instructions")
    if not messages:
        raise ApiError("input: at least one item is needed", param="input", code="invalid_value")
    return messages, tuple(where)
