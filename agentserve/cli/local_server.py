"""A server of our own in a subprocess, for commands that need one for a while."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

STOP_SECONDS = 10.0


class NoServer(Exception):
    """It ended before it was ready; what it said went to stderr."""


@contextmanager
def local_server(arguments: Sequence[str]) -> Iterator[str]:
    """`agentserve serve` with these arguments, on a free port: its URL. It is gone at the end."""
    command = [sys.executable, "-m", "agentserve", "serve", "--port", "0", "--log-level", "warning"]
    server = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        yield _url(server)
    finally:
        server.terminate()
        try:
            server.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        if server.stdout is not None:
            server.stdout.close()


def _url(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    for line in server.stdout:
        if " is ready on " in line:
            return line.rsplit(maxsplit=1)[-1]
    raise NoServer("the server could not start")
