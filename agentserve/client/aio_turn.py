"""A turn as its caller sees it, on asyncio."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from agentserve.client.aio_http import AsyncHttp, AsyncStream
from agentserve.client.aio_tools import AsyncTools
from agentserve.client.protocol import calls
from agentserve.client.protocol.errors import ClientError, StatusError
from agentserve.client.protocol.events import Call, Event, TurnResult
from agentserve.client.protocol.flow import Broken
from agentserve.client.protocol.follow import Answer, Effect, Open, Read, Tell, TurnFlow
from agentserve.client.protocol.reader import Run
from agentserve.client.protocol.toolbox import Toolbox


class AsyncTurn:
    """Iterate over its events, or await `result()`. As a context manager it lets go of its stream
    and its tools in the end; the turn itself goes on, `cancel` ends it.

    A cancelled `anext` loses nothing: the next one goes on where it was.
    """

    def __init__(
        self,
        http: AsyncHttp,
        session: str,
        box: Toolbox,
        flow: TurnFlow,
        *,
        background: AsyncTools,
        opened: set[AsyncTurn | AsyncTools],
    ) -> None:
        """`opened`: what its client closes at its end."""
        self._http = http
        self._session = session
        self._tools = AsyncTools(http, session, box)
        self._background = background
        self._flow = flow
        self._box = box
        self._opened = opened
        self._effect: Effect | None = None  # that is not answered yet
        self._answer: Answer = None
        self._stream: AsyncStream | None = None
        self._result: TurnResult | None = None
        self._closed = False

    @property
    def refused(self) -> list[tuple[Call, StatusError]]:
        """Results that the server did not take: another one was first, or the turn was over."""
        return self._tools.refused

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._closed:
            raise StopAsyncIteration
        self._opened.add(self)
        try:
            while True:
                self._tools.check()
                if self._effect is None:
                    self._effect = self._flow.send(self._answer)
                    self._answer = None
                effect = self._effect
                if isinstance(effect, Tell):
                    self._effect = None
                    return effect.event
                self._answer = await self._do(effect)
                self._effect = None
        except StopIteration as stop:
            self._result = stop.value
            await self.close()
            raise StopAsyncIteration from None
        except asyncio.CancelledError:
            await self._let_go()  # what was read of it may be lost: the next one opens it anew
            raise
        except BaseException:
            await self.close()
            raise

    async def result(self) -> TurnResult:
        """What the turn comes to; events that were not read are passed over. Where it is left by an exception
        the turn is let go of: `session.resume()` finds it."""
        try:
            async for _ in self:
                pass
        finally:
            await self.close()
        if self._result is None:
            raise ClientError("the turn was closed before its end")
        return self._result

    async def cancel(self) -> None:
        """End the turn; what comes then is its end."""
        await self._http.run(calls.cancel(self._session, self._http.means))

    async def close(self) -> None:
        self._closed = True
        self._opened.discard(self)
        self._flow.close()
        try:
            await self._tools.close()
        finally:
            await self._let_go()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _do(self, effect: Effect) -> Answer:
        match effect:
            case Run():
                self._run(effect.call)
                return None
            case Open():
                await self._let_go()
                got, self._stream = await self._http.open(effect.request)
                return got
            case Read():
                if self._stream is None:
                    return Broken("the stream was let go of")
                return await self._stream.read()
            case Tell():
                raise AssertionError("told by the caller of this")
            case _:
                return await self._http.do(effect)

    def _run(self, call: Call) -> None:
        """In the background it is the session's: the turn may end before it does."""
        if call.name in self._box.background:
            self._opened.add(self._background)
            self._background.start(call)
        else:
            self._tools.start(call)

    async def _let_go(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.close()
