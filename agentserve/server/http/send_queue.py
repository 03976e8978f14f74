"""What lies in the system for a client that has not taken it yet.

A socket takes megabytes, and takes more only when a third of its room is free: that a client reads shows
there long before it shows in what the process holds.
"""

from __future__ import annotations

import fcntl
import socket
import sys
import termios
from asyncio.trsock import TransportSocket
from contextlib import suppress

Socket = socket.socket | TransportSocket
ROOM = 64 << 10  # bytes, where the system does not say how much lies there


def unsent(sock: Socket | None) -> int | None:
    """Bytes that were written and that the client's system has not acknowledged (SIOCOUTQ, tcp(7)). None: it
    does not say."""
    if sock is None:
        return None
    with suppress(OSError, AttributeError):
        return int.from_bytes(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    return None


def bound_unseen(sock: Socket | None) -> None:
    """Where it cannot be seen, little lies there."""
    if sock is not None and unsent(sock) is None:
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ROOM)
