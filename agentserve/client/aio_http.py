"""Runs flows on asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

import httpx

from agentserve.client.protocol.flow import Broken, Flow, Pause, Reply, Request
from agentserve.client.wire import Settings, broken_by, reply_of

T = TypeVar("T")


class AsyncHttp:
    """`http`: of the caller, who also closes it; None: one of its own."""

    def __init__(self, settings: Settings, http: httpx.AsyncClient | None = None) -> None:
        self.means = settings.means()
        self._settings = settings
        self._own = http is None
        self._http = httpx.AsyncClient() if http is None else http

    async def close(self) -> None:
        if self._own:
            await self._http.aclose()

    async def run(self, flow: Flow[T]) -> T:
        """ClientError."""
        got: Reply | Broken | None = None
        while True:
            try:
                effect = flow.send(got)
            except StopIteration as stop:
                value: T = stop.value
                return value
            got = await self.do(effect)

    async def do(self, effect: Request | Pause) -> Reply | Broken | None:
        if isinstance(effect, Pause):
            await asyncio.sleep(effect.seconds)
            return None
        try:
            response = await self._http.send(self._http.build_request(**self._settings.options(effect)))
        except httpx.TransportError as error:
            return broken_by(error)
        return reply_of(response, response.content)

    async def upload(self, session: str, call: str, body: AsyncIterator[bytes]) -> int:
        """The reply's status. httpx.TransportError, and what `body` raises."""
        request = self._http.build_request(content=body, **self._settings.upload(session, call))
        return (await self._http.send(request)).status_code

    async def open(self, request: Request) -> tuple[Reply | Broken, AsyncStream | None]:
        options = self._settings.options(request, stream=True)
        try:
            response = await self._http.send(self._http.build_request(**options), stream=True)
            if response.is_success:
                return reply_of(response, b""), AsyncStream(response)
            try:
                return reply_of(response, await response.aread()), None
            finally:
                await response.aclose()
        except httpx.TransportError as error:
            return broken_by(error), None


class AsyncStream:
    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._pieces = response.aiter_bytes()

    async def read(self) -> bytes | Broken:
        try:
            piece = await anext(self._pieces, None)
        except httpx.TransportError as error:
            return broken_by(error)
        return Broken("the stream has ended") if piece is None else piece

    async def close(self) -> None:
        await self._response.aclose()
