"""A turn in flight, as the API process keeps it: enough to go on elsewhere if its worker dies.

What a turn has generated so far is the only state that matters: penalties, grammar and stop
strings are folds over it, and draws depend on (seed, position). So a turn moves by sending its
context with the generated tokens appended, and its continuation is the same, bit for bit.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections import Counter, deque
from collections.abc import Sequence

import msgspec

from agentserve.messages import StateChange, Submit, Token, TurnEnded, TurnUsage, pack_tokens
from agentserve.server.engine_port import WORKER_LOST, TurnEvent
from agentserve.types import FinishReason, SessionId, SessionState, TurnId


class RunningTurn:
    """One turn's events, in order, from whichever workers ran it. Iterated by one reader.

    Its queue is bounded by `max_tokens`, the most events a turn can still bring.
    """

    def __init__(self, command: Submit, now: float) -> None:
        self.command = command
        self.slot: int | None = None  # which worker runs it; None: waits for one
        self.moves = 0
        self.aborted = False
        self.leaving = False  # its worker was asked to give it up
        self.pages = 0  # that another worker needs for it, where it is leaving
        self.migrations = 0
        self.migrated_at = -math.inf
        self.behind: list[int] = []  # workers that it left, and that have its session yet
        self._earlier: list[TurnUsage] = []  # what it took there
        self._submitted = now
        self._first_token: float | None = None
        self._generated: array[int] = array("i")
        self._queue: deque[TurnEvent] = deque()
        self._ready = asyncio.Event()
        self.over = False

    @property
    def key(self) -> tuple[SessionId, TurnId]:
        return self.command.session, self.command.turn

    @property
    def exhausted(self) -> bool:
        """All the tokens it may generate are there, only the word that it ended is missing."""
        return self._done >= self.command.sampling.max_tokens

    @property
    def _done(self) -> int:
        return self.command.generated + len(self._generated)

    def continuation(self) -> Submit:
        """The command that lets another worker go on where this turn stands."""
        # `max_tokens` and the other limits count from the turn's prompt, so they stay as they are.
        return msgspec.structs.replace(
            self.command,
            tokens=self.command.tokens + pack_tokens(self._generated),
            generated=self._done,
            arrived=self._submitted,
            shed=self.command.shed and not (self.moves or self._earlier),  # what was begun is ended
        )

    def accept(self, event: TurnEvent, now: float) -> None:
        """Take one event from the worker that runs the turn."""
        if self.over:
            return
        match event:
            case Token():
                if self._first_token is None:
                    self._first_token = now
                if event.index != self._done:  # what was sent on is in the context: never twice
                    raise ValueError(f"token {event.index} of a turn that has {self._done}")
                self._generated.append(event.token)
            case TurnEnded():
                self.over = True
                whole = self.moves or self._earlier
                usage = self._whole_usage(event.usage) if whole else event.usage
                event = msgspec.structs.replace(event, usage=self._timed(usage))
            case StateChange():
                pass
        self._push(event)

    def lost(self, now: float) -> None:
        """Its worker died: tell the reader's timeline; the turn goes on elsewhere."""
        self.slot, self.leaving = None, False
        self.moves += 1
        self._interrupted(WORKER_LOST, now)

    def migrated(self, usage: TurnUsage, now: float) -> None:
        """Its worker gave it up for another one: it goes on there. usage: what it took so far."""
        assert self.slot is not None
        if self.slot not in self.behind:
            self.behind.append(self.slot)
        self.slot, self.leaving = None, False
        self.migrations += 1
        self.migrated_at = now
        self._earlier.append(usage)
        self._interrupted("pressure", now)

    def _interrupted(self, why: str, now: float) -> None:
        state = SessionState.PREEMPTED
        self._push(StateChange(self.command.session, self.command.turn, state, now, why))

    def end(self, reason: FinishReason, error: str, now: float) -> None:
        """End it from this side: no worker will."""
        if self.over:
            return
        self.over = True
        empty = TurnUsage(0, 0, 0, 0, 0, now, now, now, now)
        usage = self._timed(self._whole_usage(empty))
        self._push(TurnEnded(self.command.session, self.command.turn, reason, usage, error))

    def _whole_usage(self, last: TurnUsage) -> TurnUsage:
        """The usage of the whole turn, given what its last worker counted.

        What workers that died computed died with them; those that gave the turn up have told. Of the prompt
        only that is cached which none of these computed.
        """
        prompt = len(self.command.tokens) // 4 - self.command.generated
        told = [*self._earlier, last]
        return msgspec.structs.replace(
            last,
            prompt=prompt,
            cached=min(prompt, *(usage.cached for usage in told)),
            generated=self._done,
            computed=sum(usage.computed for usage in told),
            preemptions=sum(usage.preemptions for usage in told) + self.moves,
            admitted=told[0].admitted,
            swaps=sum(usage.swaps for usage in told),
            migrations=self.migrations,
            relegated=any(usage.relegated for usage in told),
            held=dict(sum((Counter(usage.held) for usage in told), Counter[str]())),
            **self._verdicts(told),
        )

    def _verdicts(self, told: Sequence[TurnUsage]) -> dict[str, tuple[str, ...]]:
        """Promises kept and missed. What one worker broke no other mends, and when the first token came is
        known here, where the last one cannot tell."""
        missed = {kind for usage in told for kind in usage.missed}
        kept = set(told[-1].kept)
        promised = self.command.slo.ttft
        if promised is not None and self._first_token is not None:
            (kept if self._first_token - self._submitted <= promised else missed).add("ttft")
        return {"kept": tuple(sorted(kept - missed)), "missed": tuple(sorted(missed))}

    def _timed(self, usage: TurnUsage) -> TurnUsage:
        """With times as this side saw them, on the clock that all processes of a machine share.

        A worker reads commands between steps: by its own times a turn never waited for the running step.
        """
        first_token = self._first_token or usage.first_token
        return msgspec.structs.replace(
            usage,
            arrived=self._submitted,
            admitted=max(min(usage.admitted, first_token), self._submitted),
            first_token=max(first_token, self._submitted),
        )

    def _push(self, event: TurnEvent) -> None:
        self._queue.append(event)
        self._ready.set()

    def __aiter__(self) -> RunningTurn:
        return self

    async def __anext__(self) -> TurnEvent:
        while not self._queue:
            if self.over:
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        return self._queue.popleft()
