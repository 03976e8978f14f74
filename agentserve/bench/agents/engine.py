"""A built engine put under agents: what of it they need, and how long their prompts may be."""

from __future__ import annotations

from agentserve.bench.agents.live import LiveRun
from agentserve.bench.agents.summary import Summary, summarise
from agentserve.clock import WallClock
from agentserve.core.engine import EngineCore
from agentserve.server.workers.worker_main import BuiltEngine
from agentserve.sim.shootout.entrants import receive_hint
from agentserve.sim.traces.draw import LONGEST, TraceSpec
from agentserve.sim.traces.players import Players


def play(built: BuiltEngine, spec: TraceSpec, lanes: int, agents: int) -> Summary:
    """The first `agents` agents, at most `lanes` at once. ValueError where they do not fit the engine."""
    core = built.core
    assert isinstance(core, EngineCore)
    longest = spec.context_limit + round(LONGEST * spec.output)
    if longest > core.limit:
        raise ValueError(
            f"agents may come to {longest} tokens, the engine holds {core.limit}: give more with --device-kv "
            "or less with --context-limit"
        )
    players = Players(spec, lanes, built.hello.vocab_size, receive_hint, agents)
    turns, seconds = LiveRun(core, built.executor, players, WallClock()).run()
    return summarise(turns, players.refused, seconds)
