"""Builds the HTTP application. No globals: everything an endpoint needs is in its context."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from agentserve.clock import Clock, WallClock
from agentserve.metrics import Metrics
from agentserve.records.writer import LineWriter
from agentserve.server.agents.means import Sleep
from agentserve.server.agents.shelf import Shelf
from agentserve.server.engine_port import Engine
from agentserve.server.errors import ApiError
from agentserve.server.http import housekeeping, sessions_api
from agentserve.server.http.access import Access, guard, paths
from agentserve.server.http.admin.routes import routes as admin_routes
from agentserve.server.http.agents.building import office_of
from agentserve.server.http.agents.routes import routes as agents_routes
from agentserve.server.http.agents.telling import Telling
from agentserve.server.http.anthropic.messages import count_tokens, messages
from agentserve.server.http.chat import chat_completions
from agentserve.server.http.completions import completions
from agentserve.server.http.context import ServerContext, ServerOptions
from agentserve.server.http.endings import ended
from agentserve.server.http.gate import Gate, Guards
from agentserve.server.http.grammars import Grammars
from agentserve.server.http.idempotency import Idempotency
from agentserve.server.http.known_errors import KNOWN, api_error
from agentserve.server.http.openapi import openapi
from agentserve.server.http.reply_port import GrammarMaker, ParserMaker
from agentserve.server.http.residency import follow_decisions
from agentserve.server.http.responses.create import publish_ends
from agentserve.server.http.responses.desk import Desk
from agentserve.server.http.responses.routes import routes as responses_routes
from agentserve.server.http.sessions.background import Background
from agentserve.server.http.sessions.event_stream import session_events
from agentserve.server.http.sessions.exclusive import Exclusive
from agentserve.server.http.sessions.fork import fork_session
from agentserve.server.http.sessions.hints import session_hints
from agentserve.server.http.sessions.results import tool_results
from agentserve.server.http.sessions.upload import tool_result_stream
from agentserve.server.http.sse import ClientGone
from agentserve.server.http.voice import error_response
from agentserve.server.http.webhooks.routes import routes as webhook_routes
from agentserve.server.sessions.chronicle import Chronicle
from agentserve.server.sessions.directory import SessionDirectory
from agentserve.server.sessions.events import EventLogs
from agentserve.server.sessions.identity import new_session_id
from agentserve.server.sessions.journal import Journal
from agentserve.server.sessions.request_log import RequestLog
from agentserve.server.sessions.room import owners
from agentserve.server.sessions.seats import Chain
from agentserve.server.sessions.transcript import Transcripts
from agentserve.server.sessions.turns import TurnRunner
from agentserve.server.stalls import StallWatch
from agentserve.server.tenants.accounts import Accounts, quotas
from agentserve.server.tenants.audit import Audit, AuditLog
from agentserve.server.tenants.keyring import Keyring
from agentserve.server.tenants.keys import may_be_secret
from agentserve.server.tenants.terms import Terms
from agentserve.server.text_port import ChatTemplate, Tokenizer
from agentserve.server.webhooks.hooks import Hooks
from agentserve.server.webhooks.making import make_hooks
from agentserve.server.webhooks.runner import WebhookTools
from agentserve.slo_classes import Promises
from agentserve.text.conversation import unread
from agentserve.tools import Tool
from tools_bridge.mcp.remote import RemoteMcp
from tools_bridge.mcp.types import Mcp
from tools_bridge.webhooks.address import AddressPolicy

LOOK_SECONDS = 1.0  # between looks for waits that are over
DISK_LOOKS = 5  # at every how many of them it is seen whether the disk of the sessions is there
log = logging.getLogger(__name__)

CLIENT_GONE_STATUS = 499  # nobody reads it; the access log does


def create_app(
    engine: Engine,
    options: ServerOptions,
    *,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    end_ids: tuple[int, ...],
    chain: Chain,
    tool_parser: ParserMaker,
    grammar_maker: GrammarMaker,
    directory: SessionDirectory | None = None,
    journal: Journal | None = None,
    chronicle: Chronicle | None = None,
    responses: Desk | None = None,
    keyring: Keyring | None = None,
    terms: Terms | None = None,
    audit: Audit | None = None,
    agents: Shelf | None = None,
    tools: Mapping[str, Tool] | None = None,
    mcp: Mcp | None = None,
    hooks: Hooks | None = None,
    recording: LineWriter | None = None,
    sleep: Sleep = asyncio.sleep,
    metrics: Metrics | None = None,
    clock: Clock | None = None,
    wall: Callable[[], float] = time.time,
    now: Callable[[], float] | None = None,
) -> Starlette:
    """The application on a running engine. Thread pools live as long as its lifespan.

    `end_ids` are the tokens that end a turn (the workers must have the same), `chain` is the
    canonical key of a history, `tool_parser` makes one parser per answer. `journal` is the book of
    `directory`; it is closed when the application ends, as are `agents` and `hooks`. `keyring`: without one
    it has the keys of `options`, as `terms` has their limits; `directory` asks the same `terms`. `tools` are
    the Python functions that agents may call; `mcp` is how they have the tools of remote servers, `sleep` how
    their time is measured. `recording` is closed with it. `now`: as `wall`, but that nobody sets it.
    """
    longest = max(map(len, tokenizer.token_bytes), default=1)
    limits = replace(options.limits, prompt_bytes=engine.hello.max_model_len * longest)
    options = replace(options, limits=limits)
    text_pool = ThreadPoolExecutor(2, thread_name_prefix="text")
    keys = keyring or Keyring(options.api_keys, options.admin_keys)
    # Its threads wait for compilations, which the maker bounds; a slow schema must not hold up others.
    grammar_pool = ThreadPoolExecutor(8, thread_name_prefix="grammar")
    clock = clock or WallClock()
    metrics = metrics or Metrics()
    metrics.show_as_vllm(
        options.model,
        {
            "block_size": str(engine.hello.page_size),
            "num_gpu_blocks": str(engine.hello.pages),
            "cache_dtype": engine.hello.kv_dtype,
            "enable_prefix_caching": "True",
        },
    )
    started, epoch = wall(), clock.now()
    terms = terms or Terms(options.tenants)
    accounts = Accounts(terms, clock.now)
    if directory is None:  # one that is empty is false
        directory = SessionDirectory(new_session_id, max_wait=options.tool_wait_seconds, quota=quotas(terms))
    if mcp is None:
        mcp = RemoteMcp(AddressPolicy(), unread, version=options.version)
    hooks = hooks or make_hooks(wall=wall)
    log = RequestLog(
        metrics.requests,
        clock,
        policy=engine.hello.policy,
        writer=recording,
        secret=lambda name: may_be_secret(name) or (keys.closed and keys.caller(name) is not None),
    )
    telling = Telling(lambda: secrets.token_hex(4))
    office = office_of(
        Shelf() if agents is None else agents,
        telling,
        tools or {},
        mcp=mcp,
        context=lambda: context,
        wall=wall,
        now=now or wall,
        most_wait=options.tool_wait_seconds,
        hooks=hooks,
        sleep=sleep,
    )
    context = ServerContext(
        options=options,
        engine=engine,
        tokenizer=tokenizer,
        template=template,
        end_ids=end_ids,
        chain=chain,
        tool_parser=tool_parser,
        grammars=Grammars(grammar_maker, engine, grammar_pool, lambda: keys.shared),
        directory=directory,
        chronicle=chronicle or Chronicle(Transcripts(), EventLogs(lambda: secrets.token_hex(4))),
        background=Background(),
        exclusive=Exclusive(),
        metrics=metrics,
        runner=TurnRunner(engine, metrics, clock, accounts, log),
        log=log,
        clock=clock,
        wall=wall,
        started=started,
        clock_at_start=epoch,
        new_seed=lambda: secrets.randbits(63),
        keyring=keys,
        accounts=accounts,
        terms=terms,
        promises=Promises(options.slo, options.tenants.classes),
        text_pool=text_pool,
        journal=journal,
        responses=responses or Desk(wall),
        hooks=hooks,
        agents=office,
        telling=telling,
        python_tools=tools or {},
        mcp=mcp,
    )

    routes = _routes()
    guard(routes, context.accounts)
    app = Starlette(
        routes=routes,
        lifespan=_lifespan(context, audit, text_pool, grammar_pool),
        exception_handlers={
            **dict.fromkeys(KNOWN, _known_error),
            ClientGone: _client_gone,
            HTTPException: _http_error,
        },
    )
    app.state.context = context
    context.chronicle.transcripts.owner_of = owners(directory.find)
    follow_decisions(context)
    app.add_middleware(Idempotency, clock=clock.now)
    guards = Guards(
        keyring=context.keyring,
        accounts=context.accounts,
        open_paths=paths(Access.OPEN),
        free_paths=paths(Access.OPEN, Access.ADMIN),
        wall=wall,
        now=clock.now,
        open_requests=context.open_requests,
        log=log,
        audit=audit,
    )
    app.add_middleware(Gate, options=options, metrics=metrics, guards=guards)
    return app


def begin_webhooks(context: ServerContext) -> None:
    """Before agents' turns go on: their calls take up what was being delivered."""
    runner = context.agents.means.runners["webhook"]
    assert isinstance(runner, WebhookTools)
    context.hooks.start(runner.wanted(context.agents.shelf))
    for history in context.agents.shelf:
        context.telling.catch_up(history)
    publish_ends(context)


def begin_drain(app: ASGIApp) -> None:
    """The server is about to leave: streams that have no end of their own end now."""
    context = getattr(app.state, "context", None) if isinstance(app, Starlette) else None
    if isinstance(context, ServerContext):
        context.chronicle.events.shut()
        context.telling.logs.shut()


def _lifespan(
    context: ServerContext, audit: Audit | None, *pools: ThreadPoolExecutor
) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        stalls = StallWatch(context.metrics.stalled, context.clock.now)
        stalls.start()
        expiry = asyncio.create_task(_look(context))
        begin_webhooks(context)
        context.agents.resume()
        try:
            yield
        finally:
            stalls.stop()
            expiry.cancel()
            await asyncio.gather(expiry, return_exceptions=True)
            context.hooks.leave()
            await context.agents.stop()
            await context.background.stop()
            await context.hooks.close()
            await context.agents.shelf.close()
            await context.responses.close()
            await asyncio.to_thread(context.grammars.close)
            for pool in pools:
                pool.shutdown(wait=False, cancel_futures=True)
            if context.journal is not None:
                await context.journal.close()
            if isinstance(audit, AuditLog):
                await asyncio.to_thread(audit.close)
            await asyncio.to_thread(context.log.close)

    return lifespan


async def _look(context: ServerContext) -> None:
    """End waits and deadlines that are over, and now and then look at idle sessions; who asks for one
    that is over finds it gone at once."""
    ttl = context.options.session_ttl_seconds
    looks = 0
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        looks += 1
        if ttl is not None and looks % math.ceil(min(max(ttl / 10, 1.0), 60.0)) == 0:
            context.expire()
        else:
            context.end_waits()
        if context.journal is not None and looks % DISK_LOOKS == 0:
            context.journal.look()
        if context.keyring.unsettled:
            await asyncio.to_thread(context.keyring.settle)
        context.look_at_keys()


def _routes() -> list[Route]:
    return [
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
        Route("/v1/models", housekeeping.models, methods=["GET"]),
        Route("/v1/models/{name:path}", housekeeping.model, methods=["GET"]),
        Route("/health", housekeeping.health, methods=["GET"]),
        Route("/ready", housekeeping.health, methods=["GET"]),
        Route("/ping", housekeeping.ping, methods=["GET", "POST"]),
        Route("/version", housekeeping.version, methods=["GET"]),
        Route("/server_info", housekeeping.server_info, methods=["GET"]),
        Route("/metrics", housekeeping.metrics, methods=["GET"]),
        Route("/openapi.json", openapi, methods=["GET"]),
        Route("/load", housekeeping.load, methods=["GET"]),
        Route("/close_session", sessions_api.close_session, methods=["POST"]),
        Route("/tokenize", housekeeping.tokenize, methods=["POST"]),
        Route("/detokenize", housekeeping.detokenize, methods=["POST"]),
        Route("/reset_prefix_cache", housekeeping.reset_prefix_cache, methods=["POST"]),
        Route("/flush_cache", housekeeping.reset_prefix_cache, methods=["POST"]),
        Route("/agentserve/sessions", sessions_api.list_sessions, methods=["GET"]),
        Route("/agentserve/sessions/{name}", sessions_api.get_session, methods=["GET"]),
        Route("/agentserve/sessions/{name}", sessions_api.delete_session, methods=["DELETE"]),
        Route("/agentserve/sessions/{name}/tool_results", tool_results, methods=["POST"]),
        Route(
            "/agentserve/sessions/{name}/tool_results/{call_id}/stream", tool_result_stream, methods=["POST"]
        ),
        Route("/agentserve/sessions/{name}/fork", fork_session, methods=["POST"]),
        Route("/agentserve/sessions/{name}/hints", session_hints, methods=["POST"]),
        Route("/agentserve/sessions/{name}/events", session_events, methods=["GET"]),
        *responses_routes(),
        *agents_routes(),
        *webhook_routes(),
        *admin_routes(),
    ]


async def _known_error(request: Request, error: Exception) -> Response:
    told = api_error(error)
    assert told is not None
    if told.status == 500:
        log.error("request %s: %s", request.scope["state"].get("request_id"), told.message)
    return error_response(told, request.scope)


async def _client_gone(request: Request, error: Exception) -> Response:
    told = ended(request.scope)
    return Response(status_code=CLIENT_GONE_STATUS) if told is None else error_response(told, request.scope)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    allowed = (error.headers or {}).get("Allow")
    reason = f"{request.method} {request.url.path[:200]}: {error.detail}"
    headers = {"allow": allowed} if allowed else None
    return error_response(ApiError(reason, status=error.status_code, headers=headers), request.scope)
