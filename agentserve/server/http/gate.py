"""What every request passes: keys are checked, the reply gets its request id, errors are counted."""

from __future__ import annotations

import asyncio
import hmac
import logging

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentserve.metrics import Metrics
from agentserve.server.errors import ApiError, shutting_down
from agentserve.server.http.context import ServerOptions
from agentserve.server.http.names import REQUEST_HEADER, request_id

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/version"})


class Gate:
    """Plain ASGI middleware: it touches headers only, so streams pass untouched."""

    def __init__(self, app: ASGIApp, options: ServerOptions, metrics: Metrics) -> None:
        self._app = app
        self._keys = [key.encode() for key in options.api_keys]
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
                MutableHeaders(scope=message)[REQUEST_HEADER] = state["request_id"]
                if message["status"] >= 400:
                    self._metrics.http_error(message["status"])
            await send(message)

        if self._keys and scope["path"] not in OPEN_PATHS and not self._admits(headers):
            refusal = ApiError("A valid API key is needed.", status=401, code="invalid_api_key")
            await refusal.response()(scope, receive, labelled)
            return
        try:
            await self._app(scope, receive, labelled)
        except asyncio.CancelledError:
            # The HTTP server cancels what still runs when its drain is over, and does nothing after
            # that: the cancellation ends here, with an answer where none has begun.
            if not started:
                await shutting_down().response()(scope, receive, labelled)
        except Exception:
            if started:
                raise  # nothing can be said any more; the server closes the connection
            log.exception("%s %s failed", scope["method"], scope["path"])
            fault = ApiError("Internal error.", status=500, code="internal_error")
            await fault.response()(scope, receive, labelled)

    def _admits(self, headers: Headers) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        # All keys are compared, each in constant time: timing tells nothing.
        return sum(hmac.compare_digest(given.encode(), key) for key in self._keys) > 0
