"""Simulated agents whose contexts together are many times the pool."""

from __future__ import annotations

from agentserve.core.config import CoreConfig
from agentserve.core.cost import StepCost
from agentserve.core.record import Entry
from agentserve.sim.run import Outcome, Simulation
from agentserve.sim.workload import Agent, WorkloadSpec, context_after, make_workload

COST = StepCost(fixed=0.005, per_row=0.0001, per_token=0.0005, per_context=1e-8)
SMALL = WorkloadSpec(agents=8, turns=3, shared_prefix=24, task=40, append=10, output=8)


def crowd(seed: int, times: int = 10) -> tuple[tuple[Agent, ...], dict[str, object], int]:
    """Agents, the settings of a core, and the pages of a pool that holds the largest of them alone."""
    spec = WorkloadSpec(
        agents=16 + seed % 7, turns=2 + seed % 3, shared_prefix=8 * (seed % 4), task=30 + seed % 40,
        append=1 + seed % 20, output=1 + seed % 12, arrivals_per_second=[0.5, 5.0, 500.0][seed % 3],
        seed=seed,
    )  # fmt: skip
    agents = make_workload(spec)
    largest = max(context_after(agent) for agent in agents)
    total = sum(context_after(agent) for agent in agents)
    settings: dict[str, object] = {
        "page_size": 4,
        "max_batched_tokens": [8, 32, 256][seed % 3],
        "max_num_seqs": 2 + seed % 15,
        "full_input_gate": seed % 5 != 0,
    }
    return agents, settings, max(total // times // 4, -(-largest // 4) + 2)


def oversubscribed(seed: int, times: int = 10, log: list[Entry] | None = None, **config: object) -> Outcome:
    """What becomes of a crowd without tiers."""
    agents, settings, pages = crowd(seed, times)
    simulation = Simulation(
        agents,
        CoreConfig(**{**settings, **config}),  # type: ignore[arg-type]
        pages=pages,
        cost=COST,
        log=log.append if log is not None else None,
        check_every_step=seed % 20 == 0,
    )
    outcome = simulation.run()
    core = simulation.core
    core.check()
    assert core.kv.pools[0].live == 0, "live pages at the end"
    core.kv.evict_all()
    assert core.kv.pools[0].free == pages, "pages leaked"
    return outcome
