"""Where may be dialled.

A URL is taken in one way of writing only; an address is judged as the number it is, with what is inside
it. Nothing here asks anybody: `dial.py` resolves a name once and dials what was judged here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

MOST_URL = 2048  # characters
MOST_ANSWERS = 64  # addresses of one name

_URL = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://"
    r"(?P<host>\[[^\[\]/?#@]*\]|[^\[\]/?#@:]*)(?::(?P<port>[0-9]{0,5}))?"
    r"(?P<target>[/?][^#]*)?\Z"
)
_WRITTEN = re.compile(r"[!-~]+\Z")  # no space, no control character, nothing beyond ASCII
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\Z")
_NUMBER = re.compile(r"([0-9]+|0x[0-9a-f]*)\Z")
_QUAD = re.compile(r"(0|[1-9][0-9]{0,2})(\.(0|[1-9][0-9]{0,2})){3}\Z")
_LOCAL_NAMES = ("localhost", "localdomain", "local", "internal", "intranet", "lan", "home", "corp", "arpa")

# Ports of services that would take an HTTP request for something else, or answer without asking who it is
# (the first half: fetch.spec.whatwg.org, "bad port").
_ODD_PORTS = frozenset(
    (
        *(1719, 1720, 1723, 2049, 3659, 4045, 4190, 5060, 5061, 6000, 6566, 6665, 6666, 6667, 6668, 6669),
        *(6679, 6697, 10080),
        *(1433, 1521, 2375, 2376, 2379, 2380, 3306, 3389, 5432, 5672, 6379, 6443, 9042, 9200, 9300, 10250),
        *(11211, 27017, 27018),
    )
)

# IANA's registries of special addresses. What is private to a network an operator may allow as a whole;
# what is nobody's, everybody's or a cloud's own only by name.
_PRIVATE = tuple(
    ip_network(text)
    for text in (
        *("10.0.0.0/8", "127.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"),
        *("192.0.2.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24"),
        *("::1/128", "fc00::/7", "2001:db8::/32", "3fff::/20"),
    )
)
_NEVER = tuple(
    ip_network(text)
    for text in (
        *("0.0.0.0/8", "169.254.0.0/16", "192.0.0.0/24", "192.31.196.0/24", "192.52.193.0/24"),
        *("192.88.99.0/24", "192.175.48.0/24", "224.0.0.0/4", "240.0.0.0/4"),
        *("168.63.129.16/32", "100.100.100.200/32"),  # Azure's and Alibaba's own services for their guests
        *("fd00:ec2::254/128", "fd20:ce::254/128"),  # Amazon's and Google's
        *("2001::/23", "2002::/16"),  # Teredo and other ways to write an IPv4 address; 6to4
    )
)
_GLOBAL6 = ip_network("2000::/3")
_NAT64 = ip_network("64:ff9b::/96")  # of an IPv6-only network with DNS64: public addresses are reached so


class Refused(Exception):
    """In one line, for whoever named the URL."""


@dataclass(frozen=True, slots=True)
class AddressPolicy:
    """`allow_private`: private networks and this machine, any port, and http. `networks`: addresses that may
    be dialled whatever they are. `hosts`: names (or `.suffix`, or addresses) for which all of
    `allow_private` holds. `allow_http`: without TLS, to public addresses too."""

    allow_private: bool = False
    allow_http: bool = False
    networks: tuple[Network, ...] = ()
    hosts: tuple[str, ...] = ()

    def trusts(self, host: str) -> bool:
        """Whether what is private may be reached by this name."""
        names = [name.lower() for name in self.hosts]
        return self.allow_private or any(
            host == name or (name.startswith(".") and host.endswith(name)) for name in names
        )


@dataclass(frozen=True, slots=True)
class Target:
    """A URL, taken apart once. `host`: lower case, an IPv6 address without brackets."""

    scheme: str
    host: str
    port: int
    target: str  # path and query
    address: Address | None  # where the host is one

    @property
    def secure(self) -> bool:
        return self.scheme == "https"

    @property
    def authority(self) -> str:
        """The header `host`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.secure else 80) else f"{host}:{self.port}"


def parse(url: str, policy: AddressPolicy) -> Target:
    """Refused, unless it may be dialled as far as can be known without asking anybody."""
    if len(url) > MOST_URL:
        raise Refused(f"the URL has more than {MOST_URL} characters")
    if not _WRITTEN.match(url) or "\\" in url:
        raise Refused("the URL has characters that need escaping (international names: as xn--…)")
    found = _URL.match(url)
    if found is None:
        raise Refused("the URL is not scheme://host[:port]/path, without user, password and fragment")
    scheme, target = found["scheme"].lower(), found["target"] or "/"
    if scheme not in ("https", "http"):
        raise Refused("the URL's scheme is not https")
    host, address = _host(found["host"])
    trusted = policy.trusts(host) or (address is not None and _listed(address, policy))
    if scheme == "http" and not (policy.allow_http or trusted):
        raise Refused("the URL's scheme is http; https is needed")
    if address is None and not trusted:
        _check_name(host)
    port = _port(found["port"], scheme, trusted)
    if address is not None:
        address = checked(host, [str(address)], policy)[0]
    return Target(scheme, host, port, target if target.startswith("/") else "/" + target, address)


def checked(host: str, answers: Sequence[str], policy: AddressPolicy) -> tuple[Address, ...]:
    """What a name stands for, to be dialled as it is here. Refused, where any of it may not be dialled."""
    if not answers:
        raise Refused(f"{host} has no address")
    if len(answers) > MOST_ANSWERS:
        raise Refused(f"{host} has more than {MOST_ANSWERS} addresses")
    addresses = [_address(host, answer) for answer in answers]
    private = policy.trusts(host)
    for address in addresses:
        if _listed(address, policy):
            continue
        if _within(address, _NEVER) or not (_is_global(address) or _within(address, _PRIVATE)):
            raise Refused(f"{host} is at a reserved, link-local or otherwise special address")
        if not private and not _is_public(address):
            raise Refused(f"{host} is at a private address")
    return tuple(dict.fromkeys(addresses))


def _address(host: str, answer: str) -> Address:
    try:
        address = ip_address(answer)
    except ValueError:
        raise Refused(f"{host} has an address that is none") from None
    if isinstance(address, IPv6Address):
        if address.scope_id is not None:
            raise Refused(f"{host} has an address with a zone")
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
    return address


def _within(address: Address, networks: Sequence[Network]) -> bool:
    return any(part in network for part in (address, *_inside(address)) for network in networks)


def _inside(address: Address) -> list[IPv4Address]:
    """The IPv4 addresses that packets to an IPv6 address may go to."""
    if isinstance(address, IPv4Address):
        return []
    inner = IPv4Address(int(address) & 0xFFFF_FFFF)
    interface = int(address) >> 32 & 0xFCFF_FFFF
    return [inner] if address in _NAT64 or interface == 0x5EFE else []  # 0x5efe: ISATAP (RFC 5214)


def _is_global(address: Address) -> bool:
    return isinstance(address, IPv4Address) or address in _GLOBAL6 or address in _NAT64


def _is_public(address: Address) -> bool:
    """By our own lists and by Python's, which may know more of it."""
    if _within(address, _PRIVATE) or _within(address, _NEVER) or not _is_global(address):
        return False
    judged = [address] if address not in _NAT64 else _inside(address)
    return all(part.is_global and not part.is_multicast for part in judged)


def _listed(address: Address, policy: AddressPolicy) -> bool:
    return any(address in network for network in policy.networks)


def _host(text: str) -> tuple[str, Address | None]:
    """Refused: what some would read as an address, and others as a name or as another one."""
    if not text:
        raise Refused("the URL has no host")
    if text.startswith("["):
        try:
            address: Address = IPv6Address(text[1:-1])
        except ValueError:
            raise Refused("the URL's host is no IPv6 address") from None
        if "%" in text:
            raise Refused("the URL's host has a zone")
        return str(address), address
    host = text.lower()
    labels = host.split(".")
    if host.endswith("."):
        raise Refused("the URL's host ends in a dot")
    if _NUMBER.match(labels[-1]):
        if not _QUAD.match(host):
            raise Refused("the URL's host is an address in an unusual form")
        try:
            return host, IPv4Address(host)
        except ValueError:
            raise Refused("the URL's host is no IPv4 address") from None
    if len(host) > 253 or not all(_LABEL.match(label) for label in labels):
        raise Refused("the URL's host is no name")
    return host, None


def _check_name(host: str) -> None:
    labels = host.split(".")
    if len(labels) == 1 or labels[-1] in _LOCAL_NAMES:
        raise Refused("the URL's host is a name of a local network")


def _port(text: str | None, scheme: str, trusted: bool) -> int:
    if text is None:
        return 443 if scheme == "https" else 80
    port = int(text) if text else 0
    if not 0 < port < 65536:
        raise Refused("the URL's port is none")
    if not trusted and ((port < 1024 and port not in (80, 443)) or port in _ODD_PORTS):
        raise Refused(f"port {port} may not be called")
    return port
