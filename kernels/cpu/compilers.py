"""Runs compilers: each in a session of its own, ended in time, its failure told in one line."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

TIMEOUT = 300.0  # seconds for one compiler run
MESSAGE = 240  # characters of a compiler's message that are shown
FULL = (errno.ENOSPC, errno.EDQUOT)


class BuildError(Exception):
    """The library cannot be built here; one line says why."""


class OutOfSpace(BuildError):
    """No room to compile in, which holds for every instruction set."""


class Runs:
    """Runs commands, each in a session of its own, so that its children end with it.

    Their temporary files go to `folder`.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._environment = {**os.environ, "LC_ALL": "C"}
        if folder is not None:
            self._environment["TMPDIR"] = str(folder)
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False

    def __call__(self, command: list[str]) -> str:
        """What the command writes. Raises `BuildError` if it fails or takes too long."""
        process = self._start(command)
        try:
            written, errors = process.communicate(timeout=TIMEOUT)
        except BaseException as error:
            _kill(process)
            process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise BuildError(f"{command[0]} took longer than {TIMEOUT:.0f} s") from None
            raise
        finally:
            with self._lock:
                self._running.discard(process)
        if process.returncode:
            raise _failure(command[0], errors or written)
        return written

    def stop(self) -> None:
        """Ends those that run; none starts any more."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                _kill(process)

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        with self._lock:
            if self._stopped:
                raise BuildError(f"{command[0]} was stopped")
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    env=self._environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise BuildError(f"{command[0]}: {error.strerror or error}") from None
            self._running.add(process)
            return process


def _kill(process: subprocess.Popen[str]) -> None:
    if process.returncode is None:  # not waited for yet: its number is still its own
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _failure(command: str, message: str) -> BuildError:
    for code in FULL:
        if os.strerror(code) in message:  # an assembler repeats it for every file
            return OutOfSpace(f"{command} failed: {os.strerror(code)}")
    lines = message.strip().splitlines()
    first = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
    return BuildError(f"{command} failed: {first if len(first) <= MESSAGE else first[:MESSAGE] + '…'}")
