"""/v1/agents/sessions: sessions are created, shown, changed, listed and deleted."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from agentserve.server.agents.history import History
from agentserve.server.agents.office import Busy, TooManyTurns
from agentserve.server.agents.records import AgentConfig, Head, Turn, new_id
from agentserve.server.agents.remote import ServerMissing
from agentserve.server.agents.shelf import Full
from agentserve.server.errors import ApiError, json_response
from agentserve.server.http.agents.asked import BLANK, check_metadata, configured, input_texts, said_of
from agentserve.server.http.agents.lookup import agent_of, check_config, session_of
from agentserve.server.http.agents.schemas import SessionRequest, SessionUpdate
from agentserve.server.http.agents.shown import session_object
from agentserve.server.http.agents.stream import opened
from agentserve.server.http.callers import tenant_of
from agentserve.server.http.context import ServerContext, context_of
from agentserve.server.http.names import SESSION_HEADER
from agentserve.server.http.promised import said_in
from agentserve.server.http.reading import read_body
from agentserve.server.http.responses.lists import page, wanted
from agentserve.server.http.schemas import decode
from agentserve.server.sessions.book import booked
from agentserve.server.text_port import JsonObject


async def create_session(request: Request) -> Response:
    """A session, with its first turn where there is an `input`. With `stream`, its events to the end of
    that turn."""
    context = context_of(request)
    limits = context.options.limits
    body = decode(await read_body(request, limits.body_bytes), SessionRequest, limits)
    if body.environment.type != "none":
        raise ApiError(
            f"environment.type: {body.environment.type[:40]!r} is not supported, only none is",
            param="environment.type",
            code="unsupported_environment",
        )
    if body.stream and body.input is None:
        raise ApiError("input: a stream needs one", param="input", code="invalid_value")
    config = _config(context, request, body)
    texts = None if body.input is None else input_texts(body.input)
    now = context.wall()
    head = Head(
        id=new_id("sess"),
        tenant=tenant_of(request),
        config=config,
        created=now,
        active=now,
        metadata=check_metadata(body.metadata or {}),
        cache_ttl=None if body.prompt_cache_options is None else body.prompt_cache_options.ttl,
    )
    try:
        history = context.agents.shelf.open(head)
    except Full as error:
        raise full(error) from None
    try:
        context.telling.created(history)
        made = ("created", 0)
        context.agents.shelf.owe(history, [made] if context.telling.wants(history, made) else [])
        if texts is None:
            await booked(context.agents.shelf.keep_head(history))
        else:
            await ask(context, history, texts)
    except BaseException:
        context.agents.shelf.drop(history)
        raise
    context.telling.kept(history)
    if body.stream:
        log = context.telling.log_of(history)
        return opened(context, history, f"{log.name}-0", one_turn=True)
    return _told(history, status=200)


async def ask(
    context: ServerContext, history: History, texts: list[list[str]], key: str | None = None
) -> Turn:
    """Begin a turn. ApiError."""
    await context.check_storage()
    try:
        return await context.agents.ask(history, texts, key)
    except Busy:
        raise ApiError(
            "A turn of this session is running.",
            status=409,
            code="turn_running",
            details={"turn": history.active.id if history.active else None},
        ) from None
    except ServerMissing as error:
        raise ApiError(
            f"An MCP server that is required cannot be had: {error}",
            status=424,
            code="mcp_server_unavailable",
        ) from None
    except TooManyTurns as error:
        again = {"retry-after": "5", "x-should-retry": "true"}
        if error.own is None:  # nothing is said of whose run
            raise ApiError("The server is busy.", status=503, code="server_busy", headers=again) from None
        raise ApiError(
            f"{error.own} turns run, and no more may. Please try again in 5s.",
            status=429,
            code="rate_limit_exceeded",
            headers=again,
        ) from None


async def get_session(request: Request) -> Response:
    return _told(session_of(context_of(request), request))


async def update_session(request: Request) -> Response:
    """What is changed of its agent counts from the next model call on."""
    context = context_of(request)
    limits = context.options.limits
    session_of(context, request)
    body = decode(await read_body(request, limits.body_bytes), SessionUpdate, limits)
    history = session_of(context, request)
    head = history.head
    config = head.config
    if body.agent is not None:
        fields = body.agent
        if fields.instructions is not UNSET:
            raise ApiError("agent.instructions: cannot be changed in a session", param="agent.instructions")
        config = configured(config, fields, context.python_tools)
        check_config(context, config, tenant_of(request))
    metadata = head.metadata
    if body.metadata is not UNSET:
        metadata = check_metadata(body.metadata or {})
    if body.prompt_cache_options is not UNSET:
        options = body.prompt_cache_options
        head.cache_ttl = None if options is None else options.ttl
    head.config, head.metadata = config, metadata
    await booked(context.agents.shelf.keep_head(history))
    return _told(history)


async def list_sessions(request: Request) -> Response:
    """`after`, `limit`, `order`, `agent_id` and `metadata[key]=value`."""
    context = context_of(request)
    labels = {
        name[len("metadata[") : -1]: value
        for name, value in request.query_params.items()
        if name.startswith("metadata[") and name.endswith("]")
    }
    agent = request.query_params.get("agent_id")
    found = [
        history
        for history in context.agents.shelf.sessions(tenant_of(request))
        if (agent is None or history.head.config.id == agent) and _has(history.head.metadata, labels)
    ]
    by_id = {history.id: history for history in found}
    shown = page([{"id": history.id} for history in found], wanted(request))
    shown["data"] = [session_object(by_id[one["id"]]) for one in shown["data"]]
    return json_response(shown)


async def delete_session(request: Request) -> Response:
    """A turn that runs is cancelled; the session is gone under all its names."""
    context = context_of(request)
    history = session_of(context, request)
    gone = await context.agents.close(history)
    session = context.directory.get(history.head.tenant, history.id)
    if session is not None:
        forgotten = context.directory.close(session)
        context.engine.close(session.key)
        context.chronicle.gone(session.key, "deleted")
        await booked(forgotten)
    await booked(gone)
    return json_response({"id": history.id, "object": "agent.session.deleted", "deleted": True})


def _config(context: ServerContext, request: Request, body: SessionRequest) -> AgentConfig:
    config = BLANK
    if body.agent_id is not None:
        config = agent_of(context, request, body.agent_id, param="agent_id").config
    if body.agent is not None:
        config = configured(config, body.agent, context.python_tools)
    slo = said_in(request.headers, said_of(config))
    if slo is not None:
        settings = config.settings | {"slo": msgspec.to_builtins(slo)}
        config = msgspec.structs.replace(config, settings=settings)
    check_config(context, config, tenant_of(request))
    return config if config.id else msgspec.structs.replace(config, id=new_id("agent"))


def full(error: Full) -> ApiError:
    return ApiError(f"The server is full: {error}.", status=503, headers={"retry-after": "1"})


def _has(metadata: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(metadata.get(key) == value for key, value in wanted.items())


def _told(history: History, status: int = 200) -> Response:
    shown: JsonObject = session_object(history)
    return json_response(shown, status=status, headers={SESSION_HEADER: history.id})
