"""Whose turn a chat request is, by its history: the one place that says so, for turns and for prompts
that are only computed or counted."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from agentserve.server.http import history
from agentserve.server.http.context import ServerContext
from agentserve.server.http.names import Identity
from agentserve.server.http.schemas import ChatRequest
from agentserve.server.sessions.seats import chain_keys
from agentserve.server.sessions.session_record import Claim
from agentserve.server.text_port import JsonObject
from agentserve.text.unfinished import call_ids


def cut_calls(context: ServerContext, tenant: str, messages: Sequence[JsonObject]) -> set[str]:
    """Ids of calls in a history that its tenant was handed in a reply that was cut: none is to be run."""
    cut = context.directory.cut
    return {id_ for message in messages for id_ in call_ids(message) if cut(tenant, id_)}


async def claim_of(
    context: ServerContext,
    tenant: str,
    fields: ChatRequest,
    messages: list[JsonObject],
    *,
    cut: Collection[str],
    whose: Identity,
) -> Claim:
    """`messages`: those of `fields`, checked and in one shape; `cut`: as `cut_calls` found them."""
    keyed = messages
    if cut:  # a history is the same with and without them
        limits, written = context.options.limits, context.tool_parser.written
        keyed = await context.off_loop(
            history.message_dicts, fields.messages, limits, cut, shown=False, written=written
        )
    keys = await context.off_loop(chain_keys, context.chain, keyed, fields.cache_salt)
    answers, calls = history.trailing_call_ids(messages), history.call_ids(messages)
    return Claim(tenant, whose.named, answers, keys, calls, whose.parent)
