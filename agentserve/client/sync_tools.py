"""Tools of one turn, or those of a session that run in the background, each in a thread of its own, with
another one that waits for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TypeVar

import httpx

from agentserve.client.protocol import calls
from agentserve.client.protocol.calls import Outcome
from agentserve.client.protocol.errors import StatusError
from agentserve.client.protocol.events import Call
from agentserve.client.protocol.toolbox import Job, Kind, Toolbox, came_to, failed, piece_of, too_late
from agentserve.client.sync_http import Http
from agentserve.client.threads import start

T = TypeVar("T")

LINGER = 1.0  # seconds that the end of a turn waits for a result that is on its way


class _Stopped(Exception):
    """Nobody waits for the result any more."""


class Tools:
    """Runs calls and brings their results, in the order in which they are there. A coroutine function gets a
    loop of its own."""

    def __init__(self, http: Http, session: str, box: Toolbox, *, streams: bool = True) -> None:
        """`streams`: results are sent while they are produced, where tools say them in pieces."""
        self.refused: list[tuple[Call, StatusError]] = []
        self._http = http
        self._session = session
        self._box = box
        self._streams = streams
        self._stop = Event()
        self._threads: list[tuple[Thread, _Source]] = []
        self._failure: BaseException | None = None

    def start(self, call: Call) -> None:
        source = _Source()
        self._threads.append((start(lambda: self._run(call, source), "agentserve-call"), source))

    def check(self) -> None:
        """Raises what kept a result from being brought."""
        if self._failure is not None:
            raise self._failure

    def wait(self) -> None:
        """Until all results are brought. Raises what kept one from it."""
        while self._threads:
            thread, _ = self._threads[0]
            thread.join()
            self._threads = [each for each in self._threads if each[0] is not thread]
        self.check()

    def close(self) -> None:
        """Nobody waits any more for what still runs."""
        self._stop.set()
        for _, source in self._threads:
            source.stop()
        ends = time.monotonic() + LINGER
        for thread, _ in self._threads:
            thread.join(max(0.0, ends - time.monotonic()))
        self._threads.clear()

    def _run(self, call: Call, source: _Source) -> None:
        try:
            outcome = self._outcome(call, source)
            if outcome is not None:
                flow = calls.give(self._session, call.turn, call.id, outcome, self._http.means)
                self._http.run(flow, self._pause)
        except _Stopped:
            return
        except StatusError as error:
            if calls.final_refusal(error):
                self.refused.append((call, error))
            else:
                self._failure = self._failure or error
        except BaseException as error:  # told by `check`
            if not self._stop.is_set():
                self._failure = self._failure or error

    def _outcome(self, call: Call, source: _Source) -> Outcome | None:
        """None: the result was brought while it was produced, or is not ours to bring."""
        job = self._box.job(call)
        if job is None or isinstance(job, Outcome):
            return job
        source.begin(job)
        streams = job.kind in (Kind.PIECES, Kind.ASYNC_PIECES)
        if self._streams and streams and self._uploaded(call, source):
            return None
        return source.rest()

    def _uploaded(self, call: Call, source: _Source) -> bool:
        """If not, the result is brought when it is whole."""
        try:
            status = self._http.upload(self._session, call.id, source.body())
        except (httpx.TransportError, _Cut):
            return False
        return status < 300 and source.whole

    def _pause(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise _Stopped


class _Late(Exception):
    """A coroutine's time is over."""


class _Cut(Exception):
    """Ends an upload whose tool has failed."""


class _Source:
    """What a tool says in its thread, read in another one, until its time is over."""

    def __init__(self) -> None:
        self._said: SimpleQueue[str | Outcome | None] = SimpleQueue()  # None: stop waiting
        self._parts: list[str] = []
        self._ends = 0.0
        self._timeout = 0.0
        self._end: Outcome | None = None

    @property
    def whole(self) -> bool:
        return self._end is not None and self._end.error is None

    def begin(self, job: Job) -> None:
        self._timeout = job.timeout
        self._ends = time.monotonic() + job.timeout
        start(lambda: self._say(job), "agentserve-tool")

    def stop(self) -> None:
        self._said.put(None)

    def body(self) -> Iterator[bytes]:
        """_Cut, _Stopped."""
        while (piece := self._next()) is not None:
            yield piece.encode()
        if not self.whole:
            raise _Cut

    def rest(self) -> Outcome:
        """All of it. _Stopped."""
        while self._next() is not None:
            pass
        assert self._end is not None
        return Outcome("".join(self._parts)) if self._parts and self.whole else self._end

    def _next(self) -> str | None:
        if self._end is not None:
            return None
        try:
            said = self._said.get(timeout=max(0.0, self._ends - time.monotonic()))
        except Empty:
            said = too_late(self._timeout)
        if said is None:
            raise _Stopped
        if isinstance(said, Outcome):
            self._end = said
            return None
        self._parts.append(said)
        return said

    # --- in the tool's thread ------------------------------------------------------------

    def _say(self, job: Job) -> None:
        try:
            self._said.put(_made(job, self._said.put))
        except _Late:
            self._said.put(too_late(job.timeout))
        except BaseException as error:  # also SystemExit: it is the tool's, not ours
            self._said.put(failed(error))


def _made(job: Job, say: Callable[[str], None]) -> Outcome:
    """What a job comes to; pieces are said before it."""
    if job.kind is Kind.PLAIN:
        return came_to(job.make())
    if job.kind is Kind.PIECES:
        for piece in job.make():
            say(piece_of(piece))
        return Outcome()
    if job.kind is Kind.COROUTINE:
        return came_to(asyncio.run(_within(job, job.make)))
    return asyncio.run(_within(job, lambda: _read(job, say)))


async def _within(job: Job, make: Callable[[], Coroutine[object, object, T]]) -> T:
    try:
        async with asyncio.timeout(job.timeout) as limit:
            return await make()
    except TimeoutError:
        if limit.expired():
            raise _Late from None
        raise  # the tool's own


async def _read(job: Job, say: Callable[[str], None]) -> Outcome:
    async for piece in job.make():
        say(piece_of(piece))
    return Outcome()
