"""A turn as its caller sees it, without asyncio."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from agentserve.client.protocol import calls
from agentserve.client.protocol.errors import ClientError, StatusError
from agentserve.client.protocol.events import Call, Event, TurnResult
from agentserve.client.protocol.flow import Broken
from agentserve.client.protocol.follow import Answer, Effect, Open, Read, Tell, TurnFlow
from agentserve.client.protocol.reader import Run
from agentserve.client.protocol.toolbox import Toolbox
from agentserve.client.sync_http import Http, Stream
from agentserve.client.sync_tools import Tools


class Turn:
    """Iterate over its events, or ask for `result()`. As a context manager it lets go of its stream
    and its tools in the end; the turn itself goes on, `cancel` ends it."""

    def __init__(
        self,
        http: Http,
        session: str,
        box: Toolbox,
        flow: TurnFlow,
        *,
        background: Tools,
        opened: set[Turn | Tools],
    ) -> None:
        """`opened`: what its client closes at its end."""
        self._http = http
        self._session = session
        self._tools = Tools(http, session, box)
        self._background = background
        self._flow = flow
        self._box = box
        self._opened = opened
        self._effect: Effect | None = None  # that is not answered yet
        self._answer: Answer = None
        self._stream: Stream | None = None
        self._result: TurnResult | None = None
        self._closed = False

    @property
    def refused(self) -> list[tuple[Call, StatusError]]:
        """Results that the server did not take: another one was first, or the turn was over."""
        return self._tools.refused

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        if self._closed:
            raise StopIteration
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
                self._answer = self._do(effect)
                self._effect = None
        except StopIteration as stop:
            self._result = stop.value
            self.close()
            raise StopIteration from None
        except BaseException:
            self.close()
            raise

    def result(self) -> TurnResult:
        """What the turn comes to; events that were not read are passed over. Where it is left by an exception
        the turn is let go of: `session.resume()` finds it."""
        try:
            for _ in self:
                pass
        finally:
            self.close()
        if self._result is None:
            raise ClientError("the turn was closed before its end")
        return self._result

    def cancel(self) -> None:
        """End the turn; what comes then is its end."""
        self._http.run(calls.cancel(self._session, self._http.means))

    def close(self) -> None:
        self._closed = True
        self._opened.discard(self)
        self._flow.close()
        try:
            self._tools.close()
        finally:
            self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _do(self, effect: Effect) -> Answer:
        match effect:
            case Run():
                self._run(effect.call)
                return None
            case Open():
                self._let_go()
                got, self._stream = self._http.open(effect.request)
                return got
            case Read():
                if self._stream is None:
                    return Broken("the stream was let go of")
                return self._stream.read()
            case Tell():
                raise AssertionError("told by the caller of this")
            case _:
                return self._http.do(effect)

    def _run(self, call: Call) -> None:
        """In the background it is the session's: the turn may end before it does."""
        if call.name in self._box.background:
            self._opened.add(self._background)
            self._background.start(call)
        else:
            self._tools.start(call)

    def _let_go(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
