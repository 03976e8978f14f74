"""A worker's engine in this process, driven through its own loop, link and exchange.

The loop is the server's; only who sits at the other end of the socket pair is ours: commands are
written before a turn of the loop, and what it reports is read after it.
"""

from __future__ import annotations

import contextlib
import socket
import time
from array import array
from collections.abc import Sequence
from typing import cast

import msgspec

from agentserve.clock import WallClock
from agentserve.core.config import CoreConfig
from agentserve.core.engine import CoreEvent, EngineCore
from agentserve.core.ports import Executor
from agentserve.messages import (
    Command,
    Describe,
    Description,
    Event,
    Park,
    SessionView,
    StepDone,
    Submit,
    TiersView,
    Token,
    ToolSignal,
    TurnEnded,
    pack_tokens,
)
from agentserve.server.workers.build_tiers import BuiltTiers
from agentserve.server.workers.exchange import Exchange, Tiering
from agentserve.server.workers.link import FrameDecoder, WorkerLink, encode_frame
from agentserve.server.workers.loop import WorkerLoop
from agentserve.server.workers.recorder import Recorder
from agentserve.server.workers.worker_main import BuiltEngine
from agentserve.types import Sampling, SessionId, TurnId
from tiering.policy.base import Policy, Signal

LONGEST_SLEEP = 0.02  # seconds: nobody else wakes a loop that has nothing to do
PATIENCE = 120.0  # seconds for anything
_READ = 1 << 20


class _ShortSleeps(WorkerLink):
    """The worker's end, which does not sleep for ever: this thread is also the API's."""

    def wait(self, timeout: float | None = None, also: Sequence[int] = ()) -> None:
        super().wait(LONGEST_SLEEP if timeout is None else min(timeout, LONGEST_SLEEP), also)


class Resumed(msgspec.Struct, frozen=True):
    """A turn of one token."""

    seconds: float  # from its Submit to the frame with its first token
    cached: int  # prompt tokens that were not computed for it


class Engine:
    """A core of its own over the pool of `built`. Not for two that use the pool at the same time, unless
    nobody cares what lies in it."""

    def __init__(
        self,
        built: BuiltEngine,
        executor: Executor,
        tiers: BuiltTiers | None = None,
        policy: Policy | None = None,
    ) -> None:
        """policy: decides instead of the one that `tiers` came with."""
        parts = tiers.parts if tiers is not None else None
        if parts is not None and policy is not None:
            parts = msgspec.structs.replace(parts, policy=policy)
        config = cast(CoreConfig, built.config)
        self.core = EngineCore(config, built.groups, built.pages, built.cost, parts)
        self._mover = tiers.mover if tiers is not None else None
        clock, recorder = WallClock(), Recorder(None)
        self._exchange: Exchange | None = None
        if tiers is not None:
            tiering = Tiering(self.core, tiers.mover, tiers.release)
            self._exchange = Exchange(tiering, clock, recorder)
        ours, self._peer = socket.socketpair(socket.AF_UNIX)
        self._link = _ShortSleeps(ours)
        self._loop = WorkerLoop(
            self.core, executor, self._link, clock=clock, recorder=recorder, exchange=self._exchange
        )
        self._frames = FrameDecoder(msgspec.msgpack.Decoder(Event))
        self._unsent = bytearray()
        self._turns: dict[SessionId, int] = {}

    def close(self) -> None:
        """Ends its mover and closes its stores; the pool stays as it is."""
        if self._exchange is not None:
            self._exchange.close()
        self._link.close()
        self._peer.close()

    # --- driving ---------------------------------------------------------------------------

    def send(self, *commands: Command) -> None:
        """They arrive with the next turns: the socket takes only so much before it is read."""
        for command in commands:
            self._unsent += encode_frame(command)
        self._push()

    def _push(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self._peer.send(self._unsent, socket.MSG_DONTWAIT)]

    def turn(self) -> float:
        """Once around the loop; its seconds."""
        self._push()
        began = time.perf_counter()
        self._loop.turn()
        return time.perf_counter() - began

    def read(self) -> list[CoreEvent]:
        """What the loop has reported. RuntimeError for a turn that failed."""
        events: list[CoreEvent] = []
        with contextlib.suppress(BlockingIOError):
            while data := self._peer.recv(_READ, socket.MSG_DONTWAIT):
                for event in self._frames.feed(data):
                    if isinstance(event, StepDone):
                        events += event.events
        for each in events:
            if isinstance(each, TurnEnded) and each.error:
                raise RuntimeError(f"{each.session}: {each.error}")
        return events

    def settle(self) -> None:
        """Until nothing runs and nothing moves. RuntimeError if that does not come."""
        deadline = time.perf_counter() + PATIENCE
        while True:
            self.turn()
            self.read()
            moving = self._mover is not None and self._mover.pending
            if not (self._unsent or moving or self.core.has_work):
                return
            if time.perf_counter() > deadline:
                raise RuntimeError(f"the engine is still at work after {PATIENCE:.0f} s")

    # --- sessions --------------------------------------------------------------------------

    def submit(self, session: SessionId, tokens: Sequence[int], count: int) -> TurnId:
        """Order a turn of `count` tokens, whatever they are."""
        turn = TurnId(self._turns.get(session, 0) + 1)
        self._turns[session] = turn
        sampling = Sampling(temperature=0.0, max_tokens=count, ignore_eos=True)
        self.send(Submit(session, turn, pack_tokens(array("i", tokens)), sampling))
        return turn

    def first_token(self, session: SessionId, tokens: Sequence[int]) -> Resumed:
        """One turn of one token, alone. RuntimeError if it does not come."""
        began, seconds = time.perf_counter(), 0.0
        turn = self.submit(session, tokens, 1)
        while time.perf_counter() - began < PATIENCE:
            self.turn()
            for event in self.read():
                if isinstance(event, Token):
                    seconds = time.perf_counter() - began
                elif isinstance(event, TurnEnded) and event.turn == turn:
                    return Resumed(seconds, event.usage.cached)
        raise RuntimeError(f"no token for {session} in {PATIENCE:.0f} s")

    def park(self, session: SessionId) -> None:
        """Its turn ended in a call to a tool."""
        self.send(Park(session, TurnId(self._turns[session]), waiting_tool=True, tools=("bench",)))

    def ask_policy(self, session: SessionId) -> None:
        """Have the policy decide anew about a session at rest, and wait until what it decided is done."""
        self.send(ToolSignal(session, TurnId(self._turns[session]), Signal.CONNECTED))
        self.settle()

    # --- looking ---------------------------------------------------------------------------

    def view(self, session: SessionId) -> SessionView:
        """RuntimeError for a session that it does not know."""
        self.send(Describe(1, session))
        self.turn()
        for event in self.read():
            if isinstance(event, Description) and event.session is not None:
                return event.session
        raise RuntimeError(f"the engine says nothing of {session}")

    def tiers(self) -> TiersView | None:
        return self.core.view().tiers
