"""What a request's path names."""

from __future__ import annotations

from starlette.requests import Request

from agentserve.server.agents.history import History
from agentserve.server.agents.records import AgentConfig, McpServer, SavedAgent, Turn
from agentserve.server.errors import ApiError
from agentserve.server.http import sampling
from agentserve.server.http.agents.asked import chat_request
from agentserve.server.http.callers import tenant_of
from agentserve.server.http.chat_request import check_supported
from agentserve.server.http.context import ServerContext
from agentserve.server.http.history import tool_dicts
from agentserve.server.http.promised import promise_of
from agentserve.server.http.schemas import ChatRequest
from tools_bridge.mcp.types import McpFailed
from tools_bridge.webhooks.address import Refused
from tools_bridge.webhooks.types import UnknownEndpoint


def session_of(context: ServerContext, request: Request) -> History:
    """Look again after every `await`: sessions are deleted at any time."""
    name = request.path_params["id"]
    history = context.agents.shelf.get(tenant_of(request), name)
    if history is None:
        raise ApiError(f"No session {name[:128]!r}.", status=404, code="session_not_found")
    return history


def turn_of(context: ServerContext, request: Request) -> tuple[History, Turn]:
    history = session_of(context, request)
    name = request.path_params["turn"]
    turn = history.turn(name)
    if turn is None:
        raise ApiError(f"No turn {name[:128]!r} in this session.", status=404, code="turn_not_found")
    return history, turn


def agent_of(
    context: ServerContext, request: Request, id_: str | None = None, *, param: str | None = None
) -> SavedAgent:
    """`id_`: where it is not in the path."""
    name: str = request.path_params["agent"] if id_ is None else id_
    agent = context.agents.shelf.agents.get(name)
    if agent is None or agent.tenant != tenant_of(request):
        raise ApiError(f"No agent {name[:128]!r}.", status=404, param=param, code="agent_not_found")
    return agent


def check_config(context: ServerContext, config: AgentConfig, tenant: str) -> None:
    """Refuse now what would be refused at every model or tool call. ApiError."""
    if not config.model:
        raise ApiError("model: missing", param="model", code="missing_required_parameter")
    for server in config.servers:
        check_server(context, server)
    limits = context.options.limits
    fields = chat_request(config, [], first=True)
    context.check_model(fields.model)
    sampling.check_fields(fields, context.facts, limits)
    check_supported(fields)
    _check_promise(context, fields, tenant)
    most = fields.max_completion_tokens
    sampling.build(fields, context.facts, limits, prompt=1, max_tokens=most, seed=0, logprobs=None)
    tool_dicts(fields.tools, limits)
    _check_webhooks(context, config, tenant)


def _check_promise(context: ServerContext, fields: ChatRequest, tenant: str) -> None:
    try:
        promise_of(context, tenant, fields)
    except ApiError as error:
        raise ApiError(f"agent.{error.message}", param=f"agent.{error.param}", code=error.code) from None


def check_server(context: ServerContext, server: McpServer) -> None:
    """Its address may be dialled, as far as that is known without asking anybody. ApiError."""
    where = f"tools: MCP server {server.label!r}"
    try:
        context.mcp.check(server.url)
    except Refused as error:
        raise ApiError(f"{where}: {error}", param="tools", code="mcp_address_refused") from None
    except McpFailed as error:
        raise ApiError(f"{where}: {error}", param="tools", code="mcp_not_installed") from None


def _check_webhooks(context: ServerContext, config: AgentConfig, tenant: str) -> None:
    for index, tool in enumerate(config.tools):
        if tool.kind != "webhook":
            continue
        param = "agent.webhook" if tool.webhook is None else f"agent.tools[{index}].webhook"
        webhook = config.webhook_of(tool)
        if webhook is None:
            raise ApiError(
                f"agent.tools[{index}].webhook: missing; name an endpoint here, or in the agent's `webhook`",
                param=f"agent.tools[{index}].webhook",
                code="missing_required_parameter",
            )
        try:
            context.hooks.named(tenant, webhook)
        except UnknownEndpoint as error:
            raise ApiError(f"{param}: {error}", status=404, param=param, code="unknown_webhook") from None
