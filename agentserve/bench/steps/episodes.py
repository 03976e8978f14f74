"""A mixed random load: agents that come, answer, call tools and go on, a few or many at a time.

An episode has a budget of tokens per step and agents of its own. Some of them begin with the same prompt.
"""

from __future__ import annotations

import math
import random
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import msgspec

from agentserve.core.config import CoreConfig
from agentserve.core.engine import EngineCore
from agentserve.core.plan import Plan, StepResult
from agentserve.messages import Park, Submit, Token, TurnEnded, WorkerView, pack_tokens
from agentserve.server.workers.worker_main import BuiltEngine
from agentserve.types import Sampling, SessionId, TurnId

LONGEST_EPISODE = 60  # steps
TURNS = (1, 4)  # of an agent
OUTPUT = (4, 48)  # tokens
RESULT = (4, 400)
PROMPT = (8, 3000)
AGENTS = (1, 1, 2, 3, 4, 6, 8, 12, 16)
SHARED = 0.4  # of agents that begin as the episode's first did
DRAWN = 0.25  # of agents that draw their tokens

Stepped = Callable[[Plan, StepResult, WorkerView, float], None]


@dataclass
class Agent:
    session: SessionId
    tokens: list[int]
    sampling: Sampling
    turns: int
    turn: int = 0


class Episode:
    """Agents on a core of their own over the engine's pool, from an empty cache on."""

    def __init__(self, built: BuiltEngine, name: str, draw: random.Random) -> None:
        """name: of its own, since executors remember turns by their names."""
        config = cast(CoreConfig, built.config)
        most = config.max_batched_tokens
        budget = draw.choice([most, most, most // 2, most // 4, most // 8])
        self._draw = draw
        self._executor = built.executor
        self._vocab = built.hello.vocab_size
        self._longest = built.hello.max_model_len
        self._core = EngineCore(
            msgspec.structs.replace(config, max_batched_tokens=max(budget, config.page_size)),
            built.groups, built.pages, built.cost,
        )  # fmt: skip
        self._agents = {}
        shared = self._text(self._length(PROMPT))
        for place in range(draw.choice(AGENTS)):
            session = SessionId(f"{name}-{place}")
            head = shared if draw.random() < SHARED else []
            agent = Agent(
                session, head + self._text(self._length(PROMPT)), self._sampling(), draw.randint(*TURNS)
            )
            self._agents[session] = agent
            self._begin(agent)

    def steps(self, stepped: Stepped) -> Iterator[None]:
        """Run it, a step at a time, to its end or for `LONGEST_EPISODE` steps."""
        core = self._core
        for _ in range(LONGEST_EPISODE):
            began = time.perf_counter()
            plan = core.begin_step(began)
            if plan is None:
                return
            result = self._executor.run(plan)
            core.finish_step(result, time.perf_counter())
            stepped(plan, result, core.view(), began)
            self._go_on()
            yield

    def _begin(self, agent: Agent) -> None:
        agent.turn += 1
        room = self._longest - len(agent.tokens) - 1
        if room < 1:
            del self._agents[agent.session]
            return
        sampling = msgspec.structs.replace(
            agent.sampling, max_tokens=min(self._draw.randint(*OUTPUT), room), ignore_eos=True
        )
        tokens = pack_tokens(array("i", agent.tokens))
        self._core.handle(Submit(agent.session, TurnId(agent.turn), tokens, sampling), time.perf_counter())

    def _go_on(self) -> None:
        """Agents whose turn is over call a tool, which answers at once, or are done."""
        for event in self._core.take_events():
            agent = self._agents.get(event.session) if isinstance(event, Token | TurnEnded) else None
            if agent is None:
                continue
            if isinstance(event, Token):
                agent.tokens.append(event.token)
                continue
            if isinstance(event, TurnEnded) and event.error:
                raise ValueError(event.error)
            if agent.turn >= agent.turns:
                continue
            self._core.handle(Park(agent.session, TurnId(agent.turn), waiting_tool=True), time.perf_counter())
            agent.tokens += self._text(self._length(RESULT))
            self._begin(agent)

    def _length(self, span: tuple[int, int]) -> int:
        """Each order of magnitude as often as another."""
        shortest, longest = span[0], max(min(span[1], self._longest // 3), span[0])
        return round(math.exp(self._draw.uniform(math.log(shortest), math.log(longest))))

    def _text(self, length: int) -> list[int]:
        return [self._draw.randrange(100, self._vocab) for _ in range(length)]

    def _sampling(self) -> Sampling:
        drawn = self._draw.random() < DRAWN
        return Sampling(temperature=0.8 if drawn else 0.0, top_p=0.95 if drawn else 1.0)


def drive(built: BuiltEngine, steps: int, seed: int, stepped: Stepped) -> None:
    """So many steps of episodes drawn from `seed`."""
    draw, done, number = random.Random(seed), 0, 0
    while done < steps:
        number += 1
        for _ in Episode(built, f"steps-{seed}-{number}", draw).steps(stepped):
            done += 1
            if done >= steps:
                return
