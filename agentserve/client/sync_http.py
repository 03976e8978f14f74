"""Runs flows in the calling thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import httpx

from agentserve.client.protocol.flow import Broken, Flow, Pause, Reply, Request
from agentserve.client.wire import Settings, broken_by, reply_of

T = TypeVar("T")


class Http:
    """`http`: of the caller, who also closes it; None: one of its own."""

    def __init__(self, settings: Settings, http: httpx.Client | None = None) -> None:
        self.means = settings.means()
        self._settings = settings
        self._own = http is None
        self._http = httpx.Client() if http is None else http

    def close(self) -> None:
        if self._own:
            self._http.close()

    def run(self, flow: Flow[T], sleep: Callable[[float], None] = time.sleep) -> T:
        """ClientError; what `sleep` raises."""
        got: Reply | Broken | None = None
        while True:
            try:
                effect = flow.send(got)
            except StopIteration as stop:
                value: T = stop.value
                return value
            got = self.do(effect, sleep)

    def do(
        self, effect: Request | Pause, sleep: Callable[[float], None] = time.sleep
    ) -> Reply | Broken | None:
        if isinstance(effect, Pause):
            sleep(effect.seconds)
            return None
        try:
            response = self._http.send(self._http.build_request(**self._settings.options(effect)))
        except httpx.TransportError as error:
            return broken_by(error)
        return reply_of(response, response.content)

    def upload(self, session: str, call: str, body: Iterator[bytes]) -> int:
        """The reply's status. httpx.TransportError, and what `body` raises."""
        request = self._http.build_request(content=body, **self._settings.upload(session, call))
        return self._http.send(request).status_code

    def open(self, request: Request) -> tuple[Reply | Broken, Stream | None]:
        options = self._settings.options(request, stream=True)
        try:
            response = self._http.send(self._http.build_request(**options), stream=True)
            if response.is_success:
                return reply_of(response, b""), Stream(response)
            try:
                return reply_of(response, response.read()), None
            finally:
                response.close()
        except httpx.TransportError as error:
            return broken_by(error), None


class Stream:
    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._pieces = response.iter_bytes()

    def read(self) -> bytes | Broken:
        try:
            piece = next(self._pieces, None)
        except httpx.TransportError as error:
            return broken_by(error)
        return Broken("the stream has ended") if piece is None else piece

    def close(self) -> None:
        self._response.close()
