"""A server in a process of its own, from its first word to its end, and a client of it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx


def url_of(process: subprocess.Popen[str]) -> str:
    """Where it listens: its first line says so."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("AgentServe is ready on "), line
    return line.split()[-1]


@contextmanager
def serving(
    *flags: str, patience: float, **pipes: Any
) -> Iterator[tuple[httpx.Client, subprocess.Popen[str]]]:
    """`agentserve serve` with one thread; in the end it is told to go, and goes well."""
    command = [sys.executable, "-m", "agentserve", "serve", "--port", "0"]
    command += ["--threads", "1", "--log-level", "warning", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **pipes)
    try:
        with httpx.Client(base_url=url_of(process), timeout=patience) as client:
            yield client, process
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=patience)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()
