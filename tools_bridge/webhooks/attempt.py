"""One attempt to deliver: a POST to a URL that somebody named, and what came of it.

Never an exception but for being cancelled: whatever a receiver, a network or a name server does is a
value. No connection is used twice.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import httpcore

from tools_bridge.webhooks.address import AddressPolicy, Refused, Target, parse
from tools_bridge.webhooks.dial import (
    Allowance,
    NotResolved,
    PinnedBackend,
    Resolver,
    addresses_of,
)
from tools_bridge.webhooks.pinned import TooLarge
from tools_bridge.webhooks.replies import Answered, Failed, Fault, Reply

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Post:
    """`seconds`: for all of it. `wants_body`: whether what a 2xx says is to be read."""

    url: str
    headers: Mapping[str, str]
    body: bytes
    seconds: float
    wants_body: bool = False


class Sender(Protocol):
    async def send(self, post: Post) -> Reply: ...


@dataclass(frozen=True, slots=True)
class SendLimits:
    connect_seconds: float = 5.0
    read_seconds: float = 15.0  # between two pieces
    head_bytes: int = 32 << 10
    body_bytes: int = 1 << 20


@dataclass(slots=True)
class HttpSender:
    """`policy`: where may be dialled. `trust`: which certificates are believed; None: the machine's."""

    policy: AddressPolicy
    resolver: Resolver
    limits: SendLimits = field(default_factory=SendLimits)
    trust: ssl.SSLContext | None = None
    backend: httpcore.AsyncNetworkBackend = field(default_factory=httpcore.AnyIOBackend)

    async def send(self, post: Post) -> Reply:
        try:
            target = parse(post.url, self.policy)
            async with asyncio.timeout(post.seconds):
                return await self._send(post, target)
        except Refused as refused:
            return Failed(Fault.REFUSED, str(refused))
        except TimeoutError:
            return Failed(Fault.TIMEOUT, f"no whole reply in {post.seconds:.3g} s")
        except Exception as error:  # of a library: no receiver may take the courier down
            if (known := _fault(error)) is not None:
                return known
            log.exception("an attempt to deliver failed")
            return Failed(Fault.INTERNAL, type(error).__name__)

    async def _send(self, post: Post, target: Target) -> Reply:
        addresses = await addresses_of(target, self.policy, self.resolver)
        allowance = Allowance(self.limits.head_bytes, self.limits.body_bytes)
        if target.secure and self.trust is None:
            self.trust = await asyncio.to_thread(ssl.create_default_context)  # it reads files
        origin = httpcore.Origin(target.scheme.encode(), target.host.encode(), target.port)
        connection = httpcore.AsyncHTTPConnection(
            origin,
            ssl_context=self.trust,
            network_backend=PinnedBackend(self.backend, target.host, target.port, addresses, allowance),
        )
        try:
            response = await connection.handle_async_request(self._request(post, target))
            allowance.head_is_whole()
            return await self._read(post, response)
        finally:
            with suppress(Exception):  # it is thrown away
                await connection.aclose()

    def _request(self, post: Post, target: Target) -> httpcore.Request:
        headers = {
            "host": target.authority,
            "user-agent": "AgentServe-Webhooks",
            "accept": "application/json",
            "accept-encoding": "identity",
            "connection": "close",
            "content-type": "application/json",
            **post.headers,
            "content-length": str(len(post.body)),
        }
        url = httpcore.URL(
            scheme=target.scheme.encode(),
            host=target.host.encode(),
            port=target.port,
            target=target.target.encode(),
        )
        limits = self.limits
        timeouts = {
            "connect": min(limits.connect_seconds, post.seconds),
            "read": limits.read_seconds,
            "write": limits.read_seconds,
        }
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        extensions = {"timeout": timeouts}
        return httpcore.Request("POST", url, headers=pairs, content=post.body, extensions=extensions)

    async def _read(self, post: Post, response: httpcore.Response) -> Reply:
        headers = {name.lower(): value.decode("latin-1") for name, value in response.headers}
        answer = Answered(
            response.status,
            headers.get(b"retry-after"),
            headers.get(b"content-type", ""),
            headers.get(b"content-encoding", ""),
        )
        if not post.wants_body or not 200 <= response.status < 300:
            return answer
        body = bytearray()
        try:
            async for piece in response.aiter_stream():
                body += piece
                if len(body) > self.limits.body_bytes:
                    raise TooLarge
        except TooLarge:
            limit = f"the reply has more than {self.limits.body_bytes} bytes"
            return Failed(Fault.TOO_LARGE, limit, response.status)
        return Answered(
            answer.status, answer.retry_after, answer.content_type, answer.content_encoding, bytes(body)
        )


def _fault(error: Exception) -> Failed | None:
    """What a receiver or a network can be the cause of."""
    match error:
        case NotResolved():
            return Failed(Fault.RESOLVE, str(error))
        case TooLarge():
            return Failed(Fault.TOO_LARGE, "the head of the reply is too large")
        case httpcore.TimeoutException():
            return Failed(Fault.TIMEOUT, type(error).__name__)
        case httpcore.ConnectError() if isinstance(error.__context__ or error.__cause__, ssl.SSLError):
            return Failed(Fault.TLS, _reason(error))
        case httpcore.ConnectError():
            return Failed(Fault.CONNECT)
        case httpcore.ProtocolError() | httpcore.NetworkError():
            return Failed(Fault.PROTOCOL)
        case ssl.SSLError() | ssl.CertificateError():
            return Failed(Fault.TLS, _reason(error))
        case OSError():
            return Failed(Fault.CONNECT)
    return None


def _reason(error: Exception) -> str:
    """OpenSSL's word for it, which has nothing of what a receiver wrote."""
    cause = error.__context__ or error.__cause__ or error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return "the certificate is not valid for this host"
    return str(getattr(cause, "reason", None) or "the handshake failed").lower().replace("_", " ")
