"""Puts the loop of agents together with the server around it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from agentserve.server.agents.means import Means, Sleep
from agentserve.server.agents.office import Office
from agentserve.server.agents.records import new_id
from agentserve.server.agents.remote import McpTools
from agentserve.server.agents.runners import ClientTools, PythonTools
from agentserve.server.agents.shelf import Shelf
from agentserve.server.http.agents.line import ChatLine
from agentserve.server.http.agents.telling import Telling
from agentserve.server.http.context import ServerContext
from agentserve.server.webhooks.hooks import Hooks
from agentserve.server.webhooks.runner import WebhookTools
from agentserve.tools import Tool
from tools_bridge.mcp.types import Mcp


def office_of(
    shelf: Shelf,
    telling: Telling,
    tools: Mapping[str, Tool],
    *,
    mcp: Mcp,
    context: Callable[[], ServerContext],
    wall: Callable[[], float],
    now: Callable[[], float],
    most_wait: float,
    hooks: Hooks,
    sleep: Sleep = asyncio.sleep,
) -> Office:
    """`context` is asked for when the first session begins a turn."""
    shelf.forget = telling.forget
    telling.publish, telling.wanted, telling.told = hooks.publish, hooks.wants, shelf.told
    webhooks = WebhookTools(hooks, most_wait)
    remote = McpTools(mcp)
    means = Means(
        shelf=shelf,
        teller=telling,
        runners={"function": ClientTools(), "python": PythonTools(tools), "webhook": webhooks, "mcp": remote},
        wall=wall,
        now=now,
        sleep=sleep,
        new_id=new_id,
        mcp=remote,
        most_wait=most_wait,
    )
    return Office(means, lambda history: ChatLine(context(), history))
