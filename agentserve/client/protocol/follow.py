"""A turn from its message to its end, over as many connections as it takes. Pure.

The stream is opened before the message is sent, so that no event can be missed; the reply's `last-event-id`
says where it begins. A connection that breaks is taken up after the last event that came whole. Where the
server has those events no longer (it was started again, or its memory of them is full), lists say what they
said.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass

from agentserve.client.protocol import calls
from agentserve.client.protocol.errors import BadReply, StreamLost
from agentserve.client.protocol.events import Event, TurnResult
from agentserve.client.protocol.flow import (
    Broken,
    Delays,
    Flow,
    Means,
    Pause,
    Reply,
    Request,
    T,
    again_after,
    error_of,
)
from agentserve.client.protocol.reader import Resync, Run, Step, TurnReader
from agentserve.client.protocol.sse import Frame, FrameTooLong, SseDecoder

PLACE = "last-event-id"
NO_TURN = "the session has no turn to follow"


@dataclass(frozen=True, slots=True)
class Open:
    """Open a stream; it takes the place of the one that is open. Answered by its Reply without a body, by a
    whole Reply where the status is none of success, or by Broken."""

    request: Request


class Read:
    """Answered by what comes next of the stream that is open, or by Broken at its end."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Hand an event to the caller."""

    event: Event


Effect = Request | Pause | Open | Read | Tell | Run
Answer = Reply | Broken | bytes | None
TurnFlow = Generator[Effect, Answer, TurnResult]


def run_turn(
    session: str, text: str | Sequence[str], means: Means, background: Collection[str] = ()
) -> TurnFlow:
    """Say something, and follow the turn that it begins. `background`: names of tools."""
    return _Following(session, means, background).run(calls.say(session, text, means))


def resume_turn(session: str, means: Means, background: Collection[str] = ()) -> TurnFlow:
    """Follow the session's last turn from wherever it is: all that it has told by now comes first."""
    return _Following(session, means, background).run(None)


class _Following:
    def __init__(self, session: str, means: Means, background: Collection[str]) -> None:
        self._session = session
        self._means = means
        self._reader = TurnReader(background=background)
        self._place: str | None = None  # the id of the last event that came, or after which to begin
        self._log: str | None = None  # of which server events came last
        self._decoder = SseDecoder()
        self._delays: Delays = means.delays()

    def run(self, say: Flow[str | None] | None) -> TurnFlow:
        yield from self._open()
        if say is not None:
            self._reader.turn = yield from _plain(say)
        else:
            yield from self._resync()
        while self._reader.ended is None:
            got = yield Read()
            if isinstance(got, bytes):
                yield from self._frames(got)
            else:
                yield from self._again(got)
        return self._reader.result()

    # --- connections -------------------------------------------------------------------

    def _open(self) -> Generator[Effect, Answer, None]:
        headers = {"accept": "text/event-stream"}
        if self._place is not None:
            headers[PLACE] = self._place
        request = Request("GET", calls.path_of(self._session, "events"), headers=headers)
        while True:
            got = yield Open(request)
            assert isinstance(got, Reply | Broken)
            if isinstance(got, Reply) and got.status < 300:
                break
            wait = again_after(request, got)
            delay = None if wait is None else self._delays.next(wait)
            if delay is None:
                raise StreamLost(got.told) if isinstance(got, Broken) else error_of(got)
            yield Pause(delay)
        self._decoder = SseDecoder()
        if self._place is None and got.headers.get(PLACE):
            self._at(got.headers[PLACE])

    def _again(self, broken: Answer) -> Generator[Effect, Answer, None]:
        told = broken.told if isinstance(broken, Broken) else "the stream has ended"
        delay = self._delays.next()
        if delay is None:
            raise StreamLost(told)
        yield Pause(delay)
        knew = self._place is not None
        yield from self._open()
        if not knew:  # what was told in between cannot be asked for
            yield from self._resync()

    def _at(self, place: str) -> None:
        self._place = place
        self._log = place.rpartition("-")[0]

    # --- events ------------------------------------------------------------------------

    def _frames(self, piece: bytes) -> Generator[Effect, Answer, None]:
        try:
            frames = self._decoder.feed(piece)
        except FrameTooLong as error:
            raise BadReply(str(error)) from None
        for frame in frames:
            yield from self._frame(frame)
            if self._reader.ended is not None:
                return

    def _frame(self, frame: Frame) -> Generator[Effect, Answer, None]:
        try:
            event = json.loads(frame.data)
        except (ValueError, RecursionError):
            raise BadReply(f"an event that is no JSON: {frame.data[:80]!r}") from None
        if not isinstance(event, dict):
            raise BadReply(f"an event that is no object: {frame.data[:80]!r}")
        self._delays.progress()
        before = self._log
        if frame.id:
            self._at(frame.id)
        same = before is None or before == self._log
        yield from self._steps(self._reader.read(event), same_server=same)

    def _steps(self, steps: Iterator[Step], *, same_server: bool = True) -> Generator[Effect, Answer, None]:
        for step in steps:
            if isinstance(step, Resync):
                yield from self._resync(same_server=same_server)
            elif isinstance(step, Run):
                yield step
            else:
                yield Tell(step)

    # --- lists -------------------------------------------------------------------------

    def _resync(self, *, same_server: bool = True) -> Generator[Effect, Answer, None]:
        """What was told meanwhile also comes as events, if they are there; by the ids of items it is known
        what came already."""
        session, means, name = self._session, self._means, self._reader.turn
        turn = yield from _plain(
            calls.last_turn(session, means)
            if name is None
            else calls.one(calls.path_of(session, "turns", name), means)
        )
        if turn is None:
            raise StreamLost(NO_TURN)
        if not isinstance(turn.get("id"), str):
            raise BadReply("a turn without id")
        items = yield from _plain(calls.all_of(calls.path_of(session, "turns", turn["id"], "items"), means))
        info = yield from _plain(calls.get_session(session, means))
        steps = self._reader.resync(info.raw, turn, items, same_server=same_server)
        yield from self._steps(steps)


def _plain(flow: Flow[T]) -> Generator[Effect, Answer, T]:
    """A flow within a turn's."""
    got: Reply | Broken | None = None
    while True:
        try:
            effect = flow.send(got)
        except StopIteration as stop:
            value: T = stop.value
            return value
        answer = yield effect
        assert not isinstance(answer, bytes)
        got = answer
