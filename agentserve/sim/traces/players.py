"""Plays agents against an engine core: commands at their times, events back. Knows no clock.

At most `lanes` agents are alive at once; those of a burst start together, as soon as there is room for
all of them (or for a burst as large as all lanes). A sub-agent is played beside its parent, in no lane
of its own. An agent that gives up leaves its lane at once: nobody waits for who has left.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from agentserve.core.engine import CoreEvent
from agentserve.messages import (
    Close,
    Command,
    Devalue,
    Fork,
    Park,
    Submit,
    Token,
    ToolSignal,
    TurnEnded,
    pack_tokens,
)
from agentserve.sim.traces.agents import Agent, AgentTurn, Ending
from agentserve.sim.traces.draw import Burst, TraceSpec, bursts, draw_agent
from agentserve.sim.traces.hints import RawHint
from agentserve.sim.traces.record import Played
from agentserve.types import FinishReason, Sampling, SessionId, TurnId
from tiering.policy.base import Departure, Hints, Signal

Receive = Callable[[RawHint, float], Hints]
"""What a server makes of a client's hint at a time."""


@dataclass(slots=True)
class _Player:
    """One agent at play."""

    agent: Agent
    context: array[int]
    known: int = 0  # tokens of the context that had KV once
    turn: int = 0  # index of the turn that runs or waits
    missing: int = 0  # results of it that are not there yet
    generated: list[int] = field(default_factory=list)
    parent: _Player | None = None

    @property
    def script(self) -> AgentTurn:
        return self.agent.turns[self.turn]

    @property
    def session(self) -> SessionId:
        return SessionId(self.agent.name)


class Players:
    """The agents of a spec: `stop()` lets turns that run end and begins no others."""

    def __init__(
        self, spec: TraceSpec, lanes: int, vocab_size: int, receive: Receive, agents: int | None = None
    ) -> None:
        """receive: the server's check of hints. agents: no more than these come (None: without end)."""
        self.spec = spec
        self.lanes = lanes
        self.played: list[Played] = []
        self.refused: list[str] = []  # why turns failed, one line each
        self._vocab_size = vocab_size
        self._receive = receive
        self._alive: dict[SessionId, _Player] = {}
        self._used = 0
        self._agents = agents
        self._bursts = bursts(spec, lanes)
        self._next: Burst = next(self._bursts)
        self._last_burst = 0.0
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._out: list[Command] = []
        self._stopped = False

    @property
    def alive(self) -> int:
        """Agents that are there now."""
        return len(self._alive)

    @property
    def live_tokens(self) -> int:
        """Tokens of all contexts that are alive: the demand for KV."""
        return sum(len(player.context) + len(player.generated) for player in self._alive.values())

    def next_due(self) -> float | None:
        """When something happens by itself next; None: only events move anything."""
        times = [self._heap[0][0]] if self._heap else []
        if not self._stopped and self._room():
            times.append(self._last_burst + self._next.gap)
        return min(times, default=None)

    def due(self, now: float) -> list[Command]:
        """Commands to hand over now, in order; what events brought about is among them."""
        while self._heap and self._heap[0][0] <= now:
            heapq.heappop(self._heap)[2](now)
        while not self._stopped and self._room() and self._last_burst + self._next.gap <= now:
            self._start_burst(now)
        commands, self._out = self._out, []
        return commands

    def stop(self) -> None:
        """Begin nothing new; turns that run may end."""
        self._stopped = True
        self._heap.clear()

    def heard(self, event: CoreEvent, now: float) -> None:
        if isinstance(event, Token):
            player = self._alive.get(event.session)
            if player is not None:
                player.generated.append(event.token)
        elif isinstance(event, TurnEnded):
            player = self._alive.get(event.session)
            if player is not None:
                self._ended(player, event, now)

    # --- agents come and go -------------------------------------------------------------------

    def _room(self) -> bool:
        if self._agents is not None and self._next.first >= self._agents:
            return False
        return self.lanes - self._used >= self._next.size

    def _start_burst(self, now: float) -> None:
        burst = self._next
        end = burst.first + burst.size
        for number in range(burst.first, end if self._agents is None else min(end, self._agents)):
            agent = draw_agent(self.spec, number)
            context = agent.prefix.tokens(self._vocab_size)
            context.extend(agent.task.tokens(self._vocab_size))
            self._used += 1
            self._enter(_Player(agent, context))
        self._last_burst = now
        self._next = next(self._bursts)

    def _enter(self, player: _Player) -> None:
        self._alive[player.session] = player
        self._submit(player)

    def _leave(self, player: _Player, now: float) -> None:
        del self._alive[player.session]
        if player.parent is None:
            self._used -= 1
        elif self._alive.get(player.parent.session) is player.parent:
            self._result(player.parent, now)

    # --- turns --------------------------------------------------------------------------------

    def _submit(self, player: _Player) -> None:
        sampling = Sampling(temperature=0.0, max_tokens=player.script.output, ignore_eos=True)
        number = TurnId(player.turn + 1)
        self._out.append(Submit(player.session, number, pack_tokens(player.context), sampling))

    def _ended(self, player: _Player, event: TurnEnded, now: float) -> None:
        self._record(player, event)
        player.context.extend(player.generated)
        player.known = max(0, len(player.context) - 1)
        player.generated = []
        if event.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            self.refused.append(f"{event.session}, turn {event.turn}: {event.reason.value} {event.error}")
            self._out.append(Close(player.session))
            self._leave(player, now)
        elif player.script.calls:
            self._rest(player, now)
        else:
            if player.agent.ending is Ending.CLOSED:
                self._out.append(Close(player.session))
            else:
                self._out.append(Park(player.session, event.turn, waiting_tool=False))
            self._leave(player, now)

    def _record(self, player: _Player, event: TurnEnded) -> None:
        usage, first = event.usage, player.turn == 0 and player.parent is None
        known = usage.cached if first else min(player.known, usage.prompt - 1)
        self.played.append(
            Played(
                session=event.session,
                turn=event.turn,
                resumed=player.turn > 0 and player.script.summary is None,
                reason=event.reason,
                arrived=usage.arrived,
                first_token=usage.first_token,
                ended=usage.ended,
                prompt=usage.prompt,
                cached=usage.cached,
                computed=usage.computed,
                generated=usage.generated,
                fresh=usage.prompt - known,
                preemptions=usage.preemptions,
            )
        )

    def _rest(self, player: _Player, now: float) -> None:
        """Its calls are out: say so, and let their results come."""
        script, turn = player.script, TurnId(player.turn + 1)
        hints = Hints() if script.hint is None else self._receive(script.hint, now)
        names = tuple(call.tool for call in script.calls)
        self._out.append(Park(player.session, turn, waiting_tool=True, tools=names, hints=hints))
        player.missing = len(script.calls)
        if self._stopped:
            return
        for call in script.calls:
            if call.child is not None:
                self._fork(player, call.child)
            elif math.isfinite(call.wait):
                self._at(now + call.wait, lambda at: self._result(player, at))
        if script.early is not None:
            signal = ToolSignal(player.session, turn, Signal.CONNECTED)
            self._at(now + script.wait - script.early, lambda _: self._out.append(signal))
        if all(math.isinf(call.wait) for call in script.calls):
            self._leave(player, now)

    def _fork(self, parent: _Player, agent: Agent) -> None:
        child = _Player(agent, parent.context[:], known=parent.known, parent=parent)
        self._out.append(Fork(parent.session, child.session, len(parent.context)))
        child.context.extend(agent.task.tokens(self._vocab_size))
        self._enter(child)

    def _result(self, player: _Player, now: float) -> None:
        """One more result is there; with the last of them the next turn begins."""
        player.missing -= 1
        if player.missing or self._stopped:
            return
        for call in player.script.calls:  # in the order of the calls, whatever order they came in
            player.context.extend(call.result.tokens(self._vocab_size))
        player.turn += 1
        summary = player.script.summary
        if summary is not None:
            if self.spec.events:
                self._out.append(Devalue(player.session, Departure.COMPACTED))
            prefix = player.agent.prefix.count
            player.context = player.context[:prefix]
            player.context.extend(summary.tokens(self._vocab_size))
            player.known = prefix
        self._submit(player)

    def _at(self, when: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._order), what))


def known_waits(spec: TraceSpec) -> Callable[[str, int], float]:
    """The true wait after a turn (from 1) of a session, for who is to know the future. Of sub-agents it
    knows their tools' time, not what the engine will add."""
    waits: dict[tuple[str, int], float] = {}
    learnt: set[int] = set()

    def learn(agent: Agent) -> None:
        for number, turn in enumerate(agent.turns, 1):
            waits[agent.name, number] = turn.wait
            for call in turn.calls:
                if call.child is not None:
                    learn(call.child)

    def wait(session: str, turn: int) -> float:
        number = int(session[1:].split(".", 1)[0])
        if number not in learnt:
            learnt.add(number)
            learn(draw_agent(spec, number))
        return waits.get((session, turn), math.inf)

    return wait
