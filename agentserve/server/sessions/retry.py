"""Tries a disk that failed once more, so that whoever asks next learns whether it is well."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future

from agentserve.server.sessions.book import booked
from agentserve.server.sessions.changes import Change, Delete, Put
from agentserve.server.sessions.environment import Table
from agentserve.server.sessions.errors import StorageFailed
from agentserve.server.sessions.writer import GroupWriter

_LARGEST_PROBE = 16 << 20  # bytes
_NAME = b"tried"


class Retry:
    """Of one writer. On the event loop."""

    def __init__(self, writer: GroupWriter, put: Callable[[Change], Future[None]]) -> None:
        """`put`: a change for the next group, not lasting."""
        self._writer = writer
        self._put = put
        self._tried: Future[None] | None = None

    async def ready(self) -> None:
        """Try a disk that failed once more. StorageFailed if it still does."""
        failure = self._writer.failure
        if failure is not None and self._writer.hung:
            raise StorageFailed(failure.reason)  # who asks next will not learn it sooner by waiting
        if failure is not None:
            await booked(self.again())

    def again(self) -> Future[None]:
        """Write what is owed, and something as large as what did not fit."""
        if self._tried is None or self._tried.done():
            probe = os.urandom(min(self._writer.short, _LARGEST_PROBE))  # zeros might take no room
            self._tried = self._put(Put(Table.META, _NAME, probe))
            if probe:
                self._tried.add_done_callback(self._tidy)
        return self._tried

    def _tidy(self, tried: Future[None]) -> None:
        """On the writer's thread: a probe that went in takes no room any more."""
        if tried.exception() is None:
            self._writer.put(Delete(Table.META, _NAME), lasting=False)
