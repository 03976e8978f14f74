"""What every request passes: keys or the host are checked and say whom it comes from, its tenant's rate is
asked, the reply gets its request id, errors are counted, and what happened is written down."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentserve.config import is_loopback
from agentserve.metrics import Metrics
from agentserve.server.errors import ApiError, shutting_down
from agentserve.server.http.access import TurnPaths
from agentserve.server.http.anthropic.errors import REQUEST_ID, speaks
from agentserve.server.http.callers import caller_in, let_in, no_key, subject_of
from agentserve.server.http.context import ServerOptions
from agentserve.server.http.endings import OpenRequests, ended
from agentserve.server.http.given_key import given_key, refuse_keys_in
from agentserve.server.http.names import REQUEST_HEADER, SESSION_HEADER, request_id
from agentserve.server.http.pace import paced
from agentserve.server.http.rates import over_limit, rate_headers
from agentserve.server.http.voice import error_response
from agentserve.server.sessions.identity import is_session_id
from agentserve.server.sessions.origin import Origin, asking
from agentserve.server.sessions.request_log import CLIENT_GONE, RequestLog
from agentserve.server.tenants.accounts import Accounts, OverLimit
from agentserve.server.tenants.audit import Audit, Entry
from agentserve.server.tenants.keyring import Keyring
from agentserve.server.tenants.keys import ANYBODY, Caller, is_key_id, may_be_secret
from agentserve.server.webhooks.hooks import CALLBACKS
from agentserve.tenant_names import is_tenant

log = logging.getLogger(__name__)

SESSION_PATH = "/agentserve/sessions/{name}"
ADMIN_PATHS = "/agentserve/admin/"
_MADE = re.compile(r"req-[0-9a-f]{24}")  # a request id of ours


@dataclass(frozen=True, slots=True)
class Guards:
    """Whom the gate asks, and tells."""

    keyring: Keyring
    accounts: Accounts
    open_paths: frozenset[str]  # that need no key
    free_paths: frozenset[str]  # that count as nobody's requests
    wall: Callable[[], float]  # Unix time
    now: Callable[[], float]
    open_requests: OpenRequests
    audit: Audit | None = None
    log: RequestLog | None = None


class Gate:
    """Plain ASGI middleware: it touches headers only, so streams pass untouched."""

    def __init__(self, app: ASGIApp, options: ServerOptions, metrics: Metrics, guards: Guards) -> None:
        self._app = app
        self._hosts = frozenset({"localhost", options.host.strip("[]").lower()})
        self._limits = options.limits
        self._metrics = metrics
        self._guards = guards
        self._turn_paths = TurnPaths()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # nothing else is served here, and nothing else has been thought of
            raise RuntimeError(f"{scope['type']!r} connections are not served")
        headers = Headers(scope=scope)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id(headers.get(REQUEST_HEADER), self._limits)
        reply = _Reply(self._guards.now())
        origin = Origin(state, self._guards.now)

        async def labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._label(scope, message, reply)
            await send(message)

        async def heard() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body"):
                origin.whole()
            return message

        try:
            with asking(origin):
                await self._pass(scope, headers, heard, labelled, reply)
        finally:
            self._write_down(scope, reply)
            self._count(scope, origin, reply.status)

    async def _pass(
        self, scope: Scope, headers: Headers, receive: Receive, send: Send, reply: _Reply
    ) -> None:
        try:
            refusal = self._refusal(scope, headers)
        except ApiError as error:
            refusal = error
        if refusal is not None:
            await error_response(refusal, scope)(scope, receive, send)
            return
        caller = caller_in(scope)
        key = None if caller is None else caller.key
        with self._guards.open_requests.held(key, receive, scope) as heard:
            await self._let_through(scope, heard, send, reply)

    async def _let_through(self, scope: Scope, receive: Receive, send: Send, reply: _Reply) -> None:
        try:
            await self._app(scope, paced(scope, receive, self._limits.body_seconds), send)
        except asyncio.CancelledError:
            # The HTTP server cancels what still runs when its drain is over, and does nothing after
            # that: the cancellation ends here, with an answer where none has begun.
            if not reply.status:
                await error_response(shutting_down(), scope)(scope, receive, send)
        except ApiError as error:  # of a middleware behind this one
            if reply.status:
                raise
            await error_response(error, scope)(scope, receive, send)
        except Exception:
            if reply.status:
                raise  # nothing can be said any more; the server closes the connection
            # As it was declared: what stands in its place may be a secret, as a callback's token is.
            log.exception("%s %s failed", scope["method"], scope["state"].get("route", "(no route)"))
            fault = ApiError("Internal error.", status=500, code="internal_error")
            await error_response(fault, scope)(scope, receive, send)
        else:
            if not reply.status and (told := ended(scope)) is not None:
                await error_response(told, scope)(scope, receive, send)

    def _label(self, scope: Scope, message: Message, reply: _Reply) -> None:
        headers = MutableHeaders(scope=message)
        headers[REQUEST_HEADER] = scope["state"]["request_id"]
        if speaks(scope):
            headers[REQUEST_ID] = scope["state"]["request_id"]
        reply.status, reply.session = message["status"], headers.get(SESSION_HEADER)
        if reply.status >= 400:
            self._metrics.http_error(reply.status)
        caller = caller_in(scope)
        if caller is not None and caller.tenant is not None:
            standings = self._guards.accounts.standings(caller.tenant)
            headers.update(rate_headers(scope["path"], standings, self._guards.wall()))

    def _write_down(self, scope: Scope, reply: _Reply) -> None:
        guards, state = self._guards, scope["state"]
        caller = caller_in(scope)
        if guards.audit is None or (caller is None and scope["path"] in guards.open_paths):
            return
        client = scope.get("client")
        guards.audit(
            Entry(
                at=round(guards.wall(), 3),
                request=self._told(state["request_id"]) or request_id(None, self._limits),
                method=scope["method"],
                status=reply.status,
                seconds=round(max(guards.now() - reply.began, 0.0), 3),
                tenant=caller.tenant if caller is not None else None,
                key=(caller.key or "open") if caller is not None else None,
                route=state.get("route"),
                session=reply.session or _session_in(scope),
                address=client[0] if client else None,
                about=self._told(subject_of(scope) or _subject_in(scope)),
            )
        )

    def _count(self, scope: Scope, origin: Origin, status: int) -> None:
        """A request for a turn that got none."""
        log = self._guards.log
        if log is None or origin.begun or 0 < status < 400 or scope["method"] != "POST":
            return
        route = self._turn_paths.route(scope["path"])
        if route is not None:
            scope["state"].setdefault("route", route)
            caller = caller_in(scope)
            log.refused(origin, None if caller is None else caller.tenant, status or CLIENT_GONE)

    def _told(self, text: str | None) -> str | None:
        """What a client named, to be written down: not what is a key, or a part of one."""
        if text is None or _MADE.fullmatch(text):
            return text
        keyring = self._guards.keyring
        secret = may_be_secret(text) or (keyring.closed and keyring.caller(text) is not None)
        return None if secret else text

    def _refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        """None: it may pass, and the scope says whom it comes from, unless anybody may come. Or ApiError."""
        refuse_keys_in(scope["path"], scope["query_string"])
        if scope["path"].startswith(CALLBACKS):  # the token in it is the key
            return None
        keyring = self._guards.keyring
        if not keyring.closed:
            if (foreign := self._foreign(headers)) is not None:
                return foreign
            let_in(scope, ANYBODY)
            caller = ANYBODY
        else:
            found = self._caller(scope, headers)
            if found is None:
                return None if scope["path"] in self._guards.open_paths else no_key()
            let_in(scope, found)
            caller = found
        if caller.tenant is not None and scope["path"] not in self._guards.free_paths:
            try:
                self._guards.accounts.request(caller.tenant)
            except OverLimit as error:
                return over_limit(error)
        return None

    def _caller(self, scope: Scope, headers: Headers) -> Caller | None:
        try:
            return self._guards.keyring.caller(given_key(headers))
        except ApiError:
            if scope["path"] in self._guards.open_paths:
                return None
            raise

    def _foreign(self, headers: Headers) -> ApiError | None:
        # Without keys the server trusts this machine, but not what web pages make a browser here
        # send: a page whose name was pointed at 127.0.0.1 shows in Host, any other in Origin.
        for header in ("host", "origin"):
            for value in headers.getlist(header):
                if not self._is_ours(_host_name(value.rpartition("://")[2])):
                    reason = f"{header}: {value[:80]!r} is not this server; configure an API key to serve it."
                    return ApiError(reason, status=403, param=header, code=f"foreign_{header}")
        return None

    def _is_ours(self, name: str) -> bool:
        return name in self._hosts or is_loopback(name)


@dataclass(slots=True)
class _Reply:
    """What became of a request."""

    began: float
    status: int = 0  # 0: no reply has begun
    session: str | None = None


def _session_in(scope: Scope) -> str | None:
    """The session that a path names, if there can be such a one."""
    if not scope["state"].get("route", "").startswith(SESSION_PATH):
        return None
    name: str = scope["path_params"]["name"]
    return name if is_session_id(name) else None


def _subject_in(scope: Scope) -> str | None:
    """The key or tenant that an admin's path names, whatever became of the request, if there can be such."""
    if not scope["state"].get("route", "").startswith(ADMIN_PATHS):
        return None
    key, tenant = (scope["path_params"].get(name, "") for name in ("id", "tenant"))
    return key if is_key_id(key) else tenant if is_tenant(tenant) else None


def _host_name(host: str) -> str:
    """Without the port; an IPv6 address without its brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()
