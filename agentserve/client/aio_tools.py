"""Tools of one turn, or those of a session that run in the background, each in a task of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx

from agentserve.client.aio_http import AsyncHttp
from agentserve.client.protocol import calls
from agentserve.client.protocol.calls import Outcome
from agentserve.client.protocol.errors import StatusError
from agentserve.client.protocol.events import Call
from agentserve.client.protocol.toolbox import Job, Kind, Toolbox, came_to, failed, piece_of, too_late
from agentserve.client.threads import in_thread

_END = object()


class AsyncTools:
    """Runs calls and brings their results, in the order in which they are there."""

    def __init__(self, http: AsyncHttp, session: str, box: Toolbox, *, streams: bool = True) -> None:
        """`streams`: results are sent while they are produced, where tools say them in pieces."""
        self.refused: list[tuple[Call, StatusError]] = []
        self._http = http
        self._session = session
        self._box = box
        self._streams = streams
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    def start(self, call: Call) -> None:
        task = asyncio.create_task(self._run(call), name=f"tool {call.name}")
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def check(self) -> None:
        """Raises what kept a result from being brought."""
        if self._failure is not None:
            raise self._failure

    async def wait(self) -> None:
        """Until all results are brought. Raises what kept one from it."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        self.check()

    async def close(self) -> None:
        """What still runs is cancelled."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()

    async def _run(self, call: Call) -> None:
        job = self._box.job(call)
        if job is None:
            return
        if isinstance(job, Outcome):
            outcome = job
        elif job.kind in (Kind.PIECES, Kind.ASYNC_PIECES):
            source = _Source(job)
            try:
                if self._streams and await self._uploaded(call, source):
                    return
                outcome = await source.rest()
            finally:
                await source.close()
        else:
            outcome = await _made(job)
        try:
            await self._http.run(calls.give(self._session, call.turn, call.id, outcome, self._http.means))
        except StatusError as error:
            if not calls.final_refusal(error):
                raise
            self.refused.append((call, error))

    async def _uploaded(self, call: Call, source: _Source) -> bool:
        """Whether the result was brought while it was produced. If not, it is brought when it is whole."""
        try:
            status = await self._http.upload(self._session, call.id, source.body())
        except (httpx.TransportError, _Cut):
            return False
        return status < 300 and source.whole


async def _made(job: Job) -> Outcome:
    try:
        async with asyncio.timeout(job.timeout) as limit:
            work = job.make() if job.kind is Kind.COROUTINE else in_thread(job.make)
            return came_to(await work)
    except TimeoutError as error:
        return too_late(job.timeout) if limit.expired() else failed(error)
    except asyncio.CancelledError as error:
        return _cancelled(error)
    except (Exception, SystemExit) as error:
        return failed(error)


def _cancelled(error: asyncio.CancelledError) -> Outcome:
    """A tool may have cancelled itself, and that is its failure; where its task is cancelled this goes on."""
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise error
    return failed(error)


class _Cut(Exception):
    """Ends an upload whose tool has failed."""


class _Source:
    """A generator's output: its pieces go out as they come, and all are kept until they are known to be
    there."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._pieces: Any = job.make()
        self._parts: list[str] = []
        self._ends = asyncio.get_running_loop().time() + job.timeout
        self._error: Outcome | None = None
        self.whole = False

    async def body(self) -> AsyncIterator[bytes]:
        while (piece := await self._next()) is not None:
            yield piece.encode()
        if self._error is not None:
            raise _Cut

    async def rest(self) -> Outcome:
        """All of it."""
        while await self._next() is not None:
            pass
        return self._error or Outcome("".join(self._parts))

    async def close(self) -> None:
        if self._job.kind is Kind.ASYNC_PIECES:
            await self._pieces.aclose()

    async def _next(self) -> str | None:
        if self.whole or self._error is not None:
            return None
        try:
            async with asyncio.timeout_at(self._ends) as limit:
                if self._job.kind is Kind.ASYNC_PIECES:
                    piece = await anext(self._pieces, _END)
                else:
                    piece = await in_thread(lambda: next(self._pieces, _END))
            if piece is _END:
                self.whole = True
                return None
            self._parts.append(piece_of(piece))
            return self._parts[-1]
        except TimeoutError as error:
            self._error = too_late(self._job.timeout) if limit.expired() else failed(error)
        except asyncio.CancelledError as error:
            self._error = _cancelled(error)
        except (Exception, SystemExit) as error:
            self._error = failed(error)
        return None
