"""Between the protocol's values and httpx, for both shells."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from agentserve.client.protocol.calls import own_path
from agentserve.client.protocol.errors import ClientError
from agentserve.client.protocol.flow import Broken, Means, Reply, Request, Retry

URL = "http://127.0.0.1:8000"
CONNECT = 5.0  # seconds
ANSWER = 60.0  # until a reply begins
SILENCE = 30.0  # of a stream; the server says something every 9 s
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


@dataclass(frozen=True, slots=True)
class Settings:
    """How a client talks. `timeout`: seconds until an answer begins; `silence`: seconds after which a stream
    that says nothing is dead."""

    base_url: str = URL
    api_key: str | None = None
    retry: Retry = field(default_factory=Retry)
    timeout: float = ANSWER
    silence: float = SILENCE
    headers: Mapping[str, str] = field(default_factory=dict)

    def means(self) -> Means:
        return Means(self.retry, Random().random, lambda: secrets.token_hex(16))

    def url(self, path: str) -> str:
        return self.base_url.rstrip("/").removesuffix("/v1") + path

    def options(self, request: Request, *, stream: bool = False) -> dict[str, Any]:
        """Arguments of `build_request`."""
        timeout = self.silence if stream else self.timeout
        headers = {**self.headers, **request.headers}
        if self.api_key is not None:
            headers["authorization"] = f"Bearer {self.api_key}"
        options: dict[str, Any] = {
            "method": request.method,
            "url": self.url(request.path),
            "headers": headers,
            "timeout": httpx.Timeout(timeout, connect=CONNECT),
        }
        if request.query:
            options["params"] = dict(request.query)
        if request.body is not None:
            options["json"] = request.body
        return options

    def upload(self, session: str, call: str) -> dict[str, Any]:
        """Of a tool's output while it is produced."""
        request = Request("POST", own_path(session, "tool_results", call, "stream"))
        options = self.options(request)
        options["headers"]["content-type"] = "text/plain; charset=utf-8"
        return options


def reply_of(response: httpx.Response, body: bytes) -> Reply:
    return Reply(response.status_code, {k.lower(): v for k, v in response.headers.items()}, body)


def broken_by(error: httpx.TransportError) -> Broken:
    """ClientError for what no second try will change."""
    told = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, httpx.UnsupportedProtocol):
        raise ClientError(told) from error
    return Broken(told, sent=not isinstance(error, _NOT_SENT))
