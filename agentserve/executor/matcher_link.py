"""How a worker talks to the host of matchers and to the one that runs (`matcher_process`), and when it stops
waiting for them: soon where they do nothing, late where they are at work."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from agentserve.executor.grammars import EACH_SECONDS, SLOW_SECONDS
from agentserve.executor.matcher_process import (
    DEFINE_SECONDS,
    Ask,
    Begin,
    Define,
    Host,
    Line,
    Spawn,
    Told,
    Vocabulary,
    cpu_seconds,
    is_readable,
)

LOOKS = 12  # at a process that does not answer, before it is given up though it is at work
STILL_SECONDS = 2.5  # between them; one that did not work meanwhile (stopped, swapped out) is given up
AT_WORK = 0.01  # of that time, on the CPU

log = logging.getLogger(__name__)


class HostGone(SystemExit):
    """The host ended or does not answer, and no other can be forked: a worker ends of it, and is replaced
    with its host as after any other end. Not an `Exception`: no turn and no step is at fault."""


class Overdue(TimeoutError):
    """It was at work for longer than its guard allows: what it was asked is at fault."""


def allowed_seconds(ask: Ask) -> float:
    """Of CPU."""
    if isinstance(ask, Define):
        return DEFINE_SECONDS
    return SLOW_SECONDS + EACH_SECONDS * (len(ask.tokens) if isinstance(ask, Begin) else 0)


class MatcherLink:
    """One thread. `still_seconds`: see `STILL_SECONDS`."""

    def __init__(self, host: Host, vocabulary: Vocabulary, still_seconds: float) -> None:
        self.pid = 0  # of the matcher that runs
        self._link, self._host_pid = host
        self._vocabulary = vocabulary
        self._still_seconds = still_seconds
        self._host: Line[Spawn] | None = None
        self._child: Line[Told] | None = None

    @property
    def runs(self) -> bool:
        """Whether there is a matcher, dead or alive."""
        return self._child is not None

    def tell(self, ask: Ask) -> None:
        """One that is not answered. Any OSError: as in `asked`."""
        assert self._child is not None
        self._child.send(ask)

    def asked(self, ask: Ask) -> Told | None:
        """None, or an OSError, if the process ended; TimeoutError if it stands still; Overdue."""
        assert self._child is not None
        began = cpu_seconds(self.pid)
        self._child.send(ask)
        if not self._answers(self._child.readable, self.pid):
            late = cpu_seconds(self.pid) - began > allowed_seconds(ask)
            raise Overdue if late else TimeoutError
        return self._child.receive()

    def close(self) -> None:
        """Nothing can be asked any more, and both processes have ended."""
        for line in (self._child, self._host):
            if line is not None:
                line.close()
        self._link.close()
        with suppress(OSError):  # it was waited for already
            os.kill(self._host_pid, signal.SIGKILL)
            os.waitpid(self._host_pid, 0)

    def _answers(self, readable: Callable[[float], bool], pid: int) -> bool:
        """False once it was at work for too long; TimeoutError as soon as it does nothing."""
        before = cpu_seconds(pid)
        for _ in range(LOOKS):
            if readable(self._still_seconds):
                return True
            now = cpu_seconds(pid)
            if now - before < AT_WORK * self._still_seconds:
                raise TimeoutError
            before = now
        return False

    def spawn(self) -> int:
        """A new matcher; how the one before ended (0 if there was none). HostGone."""
        if self._child is not None:
            self._child.close()
        try:
            said, files = self._asked_of_host()
        except OSError as error:  # a TimeoutError, too
            log.error("the host of grammars does not answer: %s", str(error) or type(error).__name__)
            files = []
        if not files:
            raise HostGone("the host of grammars is gone: this worker ends, to be replaced with it")
        child = socket.socket(fileno=files[0])
        child.settimeout(self._still_seconds)
        self._child = Line(child, Told)
        status, self.pid = map(int, said.split())
        return status

    def _asked_of_host(self) -> tuple[bytes, list[int]]:
        self._link.settimeout(self._still_seconds)
        if self._host is None:
            self._host = Line(self._link, Spawn)
            self._host.send(self._vocabulary)
        self._host.send(Spawn())
        if not self._answers(partial(is_readable, self._link), self._host_pid):
            raise TimeoutError
        said, files, _, _ = socket.recv_fds(self._link, 64, 1)
        return said, files
