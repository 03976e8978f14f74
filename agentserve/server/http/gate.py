"""What every request passes: keys or the host are checked, the reply gets its request id, errors are
counted."""

from __future__ import annotations

import asyncio
import hmac
import logging

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentserve.config import is_loopback
from agentserve.metrics import Metrics
from agentserve.server.errors import ApiError, shutting_down
from agentserve.server.http.anthropic.errors import REQUEST_ID, is_ours
from agentserve.server.http.context import ServerOptions
from agentserve.server.http.names import REQUEST_HEADER, request_id
from agentserve.server.http.voice import error_response
from agentserve.server.webhooks.hooks import CALLBACKS

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/version"})


class Gate:
    """Plain ASGI middleware: it touches headers only, so streams pass untouched."""

    def __init__(self, app: ASGIApp, options: ServerOptions, metrics: Metrics) -> None:
        self._app = app
        self._keys = [key.encode() for key in options.api_keys]
        self._hosts = frozenset({"localhost", options.host.strip("[]").lower()})
        self._limits = options.limits
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id(headers.get(REQUEST_HEADER), self._limits)

        started = False

        async def labelled(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                told = MutableHeaders(scope=message)
                told[REQUEST_HEADER] = state["request_id"]
                if is_ours(scope["path"]):
                    told[REQUEST_ID] = state["request_id"]
                if message["status"] >= 400:
                    self._metrics.http_error(message["status"])
            await send(message)

        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            await error_response(refusal, scope)(scope, receive, labelled)
            return
        try:
            await self._app(scope, receive, labelled)
        except asyncio.CancelledError:
            # The HTTP server cancels what still runs when its drain is over, and does nothing after
            # that: the cancellation ends here, with an answer where none has begun.
            if not started:
                await error_response(shutting_down(), scope)(scope, receive, labelled)
        except Exception:
            if started:
                raise  # nothing can be said any more; the server closes the connection
            log.exception("%s %s failed", scope["method"], scope["path"])
            fault = ApiError("Internal error.", status=500, code="internal_error")
            await error_response(fault, scope)(scope, receive, labelled)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        if path.startswith(CALLBACKS):  # the token in it is the key
            return None
        if self._keys:
            if path in OPEN_PATHS or self._admits(headers):
                return None
            return ApiError("A valid API key is needed.", status=401, code="invalid_api_key")
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

    def _admits(self, headers: Headers) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        # All keys are compared, each in constant time: timing tells nothing.
        return sum(hmac.compare_digest(given.encode(), key) for key in self._keys) > 0


def _host_name(host: str) -> str:
    """Without the port; an IPv6 address without its brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()
