"""/v1/agents: configurations to make sessions of."""

from __future__ import annotations

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from agentserve.server.agents.records import SavedAgent, new_id
from agentserve.server.agents.shelf import Full
from agentserve.server.errors import json_response
from agentserve.server.http.agents.asked import BLANK, check_metadata, configured
from agentserve.server.http.agents.lookup import agent_of, check_config
from agentserve.server.http.agents.schemas import AgentRequest
from agentserve.server.http.agents.sessions import full
from agentserve.server.http.agents.shown import agent_object
from agentserve.server.http.callers import tenant_of
from agentserve.server.http.context import ServerContext, context_of
from agentserve.server.http.reading import read_body
from agentserve.server.http.responses.lists import page, wanted
from agentserve.server.http.schemas import decode
from agentserve.server.sessions.book import booked


async def create_agent(request: Request) -> Response:
    context = context_of(request)
    body = await _body(context, request)
    config = configured(BLANK, body, context.python_tools, "body")
    check_config(context, config, tenant_of(request))
    now = context.wall()
    metadata = check_metadata({} if body.metadata is UNSET else body.metadata or {})
    agent = SavedAgent(
        tenant_of(request), msgspec.structs.replace(config, id=new_id("agent")), now, now, metadata
    )
    return await _saved(context, agent)


async def get_agent(request: Request) -> Response:
    return json_response(agent_object(agent_of(context_of(request), request)))


async def update_agent(request: Request) -> Response:
    """Sessions that were made of it stay as they are."""
    context = context_of(request)
    agent_of(context, request)
    body = await _body(context, request)
    before = agent_of(context, request)
    config = configured(before.config, body, context.python_tools, "body")
    check_config(context, config, tenant_of(request))
    metadata = before.metadata if body.metadata is UNSET else check_metadata(body.metadata or {})
    agent = SavedAgent(before.tenant, config, before.created, context.wall(), metadata)
    return await _saved(context, agent)


async def list_agents(request: Request) -> Response:
    saved = context_of(request).agents.shelf.agents.values()
    own = (agent for agent in saved if agent.tenant == tenant_of(request))
    agents = sorted(own, key=lambda one: (one.created, one.id))
    return json_response(page([agent_object(agent) for agent in agents], wanted(request)))


async def delete_agent(request: Request) -> Response:
    context = context_of(request)
    agent = agent_of(context, request)
    await booked(context.agents.shelf.drop_agent(agent.id))
    return json_response({"id": agent.id, "object": "agent.deleted", "deleted": True})


async def _saved(context: ServerContext, agent: SavedAgent) -> Response:
    try:
        kept = context.agents.shelf.save_agent(agent)
    except Full as error:
        raise full(error) from None
    await booked(kept)
    return json_response(agent_object(agent))


async def _body(context: ServerContext, request: Request) -> AgentRequest:
    limits = context.options.limits
    return decode(await read_body(request, limits.body_bytes), AgentRequest, limits)
