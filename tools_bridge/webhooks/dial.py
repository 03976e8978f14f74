"""Connections to the addresses that were judged, and to nothing else.

A name is resolved once; the backend given to httpcore (`pinned.py`) knows the addresses that were found
good, dials them, and resolves nothing. TLS still checks the name. httpcore itself follows no redirects and
knows no proxies. What comes back is cut at a number of bytes, as it is read.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import httpcore

from tools_bridge.webhooks.address import Address, AddressPolicy, Target, checked
from tools_bridge.webhooks.pinned import Bounded, Pinned

_MOST_ASKED = 256  # threads: a name server that is slow holds those who ask it, for as long as it likes


class NotResolved(Exception):
    pass


class Resolver(Protocol):
    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """All addresses of a name, as numbers. NotResolved."""
        ...


class SystemResolver:
    """As the machine resolves names. Who asks for what is being asked waits for that, so that a name holds
    one thread; threads do not hold up the end of the process."""

    def __init__(self) -> None:
        self._asked: dict[tuple[str, int], asyncio.Future[list[str]]] = {}

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        asked = self._asked.get((host, port))
        if asked is None:
            if len(self._asked) >= _MOST_ASKED:
                raise NotResolved("too many names are being resolved")
            asked = self._ask(host, port)
        try:
            return await asyncio.shield(asked)
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            raise NotResolved(reason or type(error).__name__) from error

    def _ask(self, host: str, port: int) -> asyncio.Future[list[str]]:
        loop = asyncio.get_running_loop()
        asked: asyncio.Future[list[str]] = loop.create_future()

        def ended(found: list[str] | Exception) -> None:
            del self._asked[host, port]
            if isinstance(found, Exception):
                asked.set_exception(found)
                asked.exception()  # whoever asked may be gone
            else:
                asked.set_result(found)

        def work() -> None:
            try:
                found: list[str] | Exception = _look_up(host, port)
            except Exception as error:
                found = error
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(ended, found)

        self._asked[host, port] = asked
        threading.Thread(target=work, name="resolve", daemon=True).start()
        return asked


def _look_up(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return [str(place[0]) for *_, place in found]


async def addresses_of(target: Target, policy: AddressPolicy, resolver: Resolver) -> tuple[Address, ...]:
    """What is to be dialled for a URL that was parsed, found once and judged. Whoever dials an address that
    somebody named dials these, and asks for no other. Refused, NotResolved."""
    answers = [str(target.address)]
    if target.address is None:
        answers = list(await resolver.resolve(target.host, target.port))
    return checked(target.host, answers, policy)


class Allowance:
    """Bytes that may still be read of a reply. Before its head is whole, only so many."""

    def __init__(self, head: int, body: int) -> None:
        self._left = head
        self._body = body

    @property
    def left(self) -> int:
        return self._left

    def head_is_whole(self) -> None:
        # Of a body in pieces, each piece says how long it is: with one byte each that is six times as much.
        self._left = self._left + 8 * self._body + 1024

    def take(self, count: int) -> None:
        self._left -= count


class BoundedStream(Bounded, httpcore.AsyncNetworkStream):
    pass


class PinnedBackend(Pinned, httpcore.AsyncNetworkBackend):
    """For one attempt."""

    stream = BoundedStream
    failures = (httpcore.ConnectError, httpcore.ConnectTimeout)
