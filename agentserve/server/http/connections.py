"""Connections that are open, in all and of each address, and what lies here for their clients."""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class WireBounds:
    head_bytes: int = 64 << 10
    headers: int = 100
    url_bytes: int = 8 << 10
    head_seconds: float = 10.0  # from a connection's, or a request's, first sign to its last header
    linger_seconds: float = 5.0  # for the rest of a request that was answered before it was whole
    unread_seconds: float = 30.0  # in which a client takes some of what lies there for it
    unread_bytes: int = 256 << 20  # that lie here for all clients together
    connections: int = 4096
    per_address: int = 2048


class Lying(Protocol):
    """A connection for whose client something may lie here."""

    address: str
    transport: asyncio.Transport

    def cut_off(self) -> None: ...


class Connections:
    """Those that are open, in all and of each address."""

    def __init__(self, bounds: WireBounds) -> None:
        self._bounds = bounds
        self._of: Counter[str] = Counter()
        self._all = 0
        self.refused = 0
        self.unread = 0  # that were cut off because nobody read
        self._lying: dict[Lying, int] = {}  # bytes of replies, of those for whom some lie here
        self.unread_bytes = 0

    def __len__(self) -> int:
        return self._all

    def admit(self, address: str) -> bool:
        if self._all >= self._bounds.connections or self._of[address] >= self._bounds.per_address:
            self.refused += 1
            return False
        self._of[address] += 1
        self._all += 1
        return True

    def left(self, address: str) -> None:
        self._of[address] -= 1
        self._all -= 1
        if not self._of[address]:
            del self._of[address]

    def lie(self, one: Lying, size: int) -> None:
        """So many bytes lie here for a client; 0: it has taken them, or is gone."""
        self.unread_bytes += size - self._lying.pop(one, 0)
        if size:
            self._lying[one] = size

    def too_many(self) -> list[Lying]:
        """Who is to be cut off, for too much lies here: whose reply has lain longest, of the address for
        which most lies here."""
        gone: list[Lying] = []
        if self.unread_bytes > self._bounds.unread_bytes:
            self._lying = {one: one.transport.get_write_buffer_size() for one in self._lying}
            self.unread_bytes = sum(self._lying.values())
        while self.unread_bytes > self._bounds.unread_bytes:
            of: Counter[str] = Counter()
            for one, size in self._lying.items():
                of[one.address] += size
            ((most, _),) = of.most_common(1)
            gone.append(next(one for one in self._lying if one.address == most))
            self.lie(gone[-1], 0)
        return gone


def counted_as(address: str) -> str:
    """The address that a client is known by: whoever has IPv6 has 2^64 of them, so its network."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, 64), strict=False))
