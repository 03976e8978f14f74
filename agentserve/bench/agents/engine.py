"""A built engine put under agents: what of it they need, and how long their prompts may be."""

from __future__ import annotations

from contextlib import ExitStack

from agentserve.bench.agents.live import LiveRun
from agentserve.bench.agents.summary import Summary, summarise
from agentserve.bench.agents.tiers import TierOptions, with_tiers
from agentserve.clock import WallClock
from agentserve.messages import TiersView
from agentserve.server.workers.worker_main import BuiltEngine
from agentserve.sim.shootout.entrants import receive_hint
from agentserve.sim.traces.draw import LONGEST, TraceSpec
from agentserve.sim.traces.players import Players


def play(
    built: BuiltEngine, options: TierOptions, spec: TraceSpec, lanes: int, agents: int
) -> tuple[Summary, TiersView | None]:
    """The first `agents` agents, at most `lanes` at once, and what the tiers did.

    ValueError where they do not fit the engine, or a tier cannot be had.
    """
    longest = spec.context_limit + round(LONGEST * spec.output)
    with ExitStack() as stack:
        core, mover = with_tiers(built, options, stack)
        if longest > core.limit:
            raise ValueError(
                f"agents may come to {longest} tokens, the engine holds {core.limit}: "
                "give more with --device-kv, or less with --context-limit"
            )
        players = Players(spec, lanes, built.hello.vocab_size, receive_hint, agents)
        turns, seconds = LiveRun(core, built.executor, players, WallClock(), mover).run()
        return summarise(turns, players.refused, seconds), core.view().tiers
