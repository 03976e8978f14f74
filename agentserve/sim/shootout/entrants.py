"""Who takes part: policies by name with the parameters that a sweep may turn, on a core with tiers."""

from __future__ import annotations

from collections.abc import Sequence

from agentserve.core.config import CoreConfig
from agentserve.core.engine import EngineCore
from agentserve.core.market import TierParts, TierSetup
from agentserve.sim.hardware import Hardware
from agentserve.sim.shootout.contest import ORACLE, Arena, Entrant
from agentserve.sim.traces.draw import TraceSpec
from agentserve.sim.traces.hints import RawHint
from agentserve.sim.traces.players import known_waits
from agentserve.types import KVGroup
from tiering.hints import receive
from tiering.policy.base import Hints, Policy, Prices
from tiering.policy.registry import DEFAULTS, policy_named, policy_names
from tiering.prices import PriceBook

_FREE = Prices(1, (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0, 0.0), 1)
"""Of a machine that takes no time; no policy's parameters depend on prices."""


def entrant_names() -> tuple[str, ...]:
    """Everybody, the oracle last."""
    return (*policy_names(), ORACLE)


def entrants(names: Sequence[str]) -> list[Entrant]:
    """These policies with their defaults, the published ones. Raises ValueError, in one line, if one is
    unknown. The oracle is ours with the true waits, so it has our parameters."""
    known = entrant_names()
    for name in names:
        if name not in known:
            raise ValueError(f'no policy "{name[:64]}"; there are: {", ".join(known)}')
    return [Entrant(name, DEFAULTS["priced" if name == ORACLE else name]) for name in names]


def make_policy(entrant: Entrant, hardware: Hardware, spec: TraceSpec) -> Policy:
    """Raises ValueError if the parameters are none that the policy takes."""
    waits = known_waits(spec) if entrant.name == ORACLE else None
    return policy_named(entrant.name, hardware.prices(), parameters=entrant.parameters, waits=waits)


def accepted(entrant: Entrant) -> bool:
    """Whether the policy takes these parameters."""
    try:
        policy_named(entrant.name, _FREE, parameters=entrant.parameters, waits=lambda session, turn: 0.0)
    except ValueError:
        return False
    return True


def build_core(hardware: Hardware, entrant: Entrant, spec: TraceSpec) -> EngineCore:
    """A core of this machine with all tiers, and the policy in charge of them."""
    policy = make_policy(entrant, hardware, spec)
    prices = hardware.prices()
    setup = TierSetup(
        policy=policy.name,
        host_slots=hardware.host_kv // hardware.block_bytes,
        disk_bytes=hardware.disk_kv,
        block_bytes=hardware.block_bytes,
        prices=prices,
    )
    longest = spec.context_limit + 8 * (spec.output + spec.result)
    config = CoreConfig(
        page_size=hardware.page_size,
        max_model_len=longest,
        max_num_seqs=hardware.max_num_seqs,
        max_batched_tokens=hardware.max_batched_tokens,
    )
    groups = (KVGroup("full", (0,), hardware.block_bytes),)
    parts = TierParts(setup, policy, PriceBook(prices))
    return EngineCore(config, groups, (hardware.pages,), hardware.step_cost(), parts)


def receive_hint(raw: RawHint, now: float) -> Hints:
    """What the server makes of it: bounds are kept, nonsense is rejected."""
    hints, _ = receive({"expected_wait": raw.expected_wait, "priority": raw.priority}, now)
    return hints


ARENA = Arena(build_core, receive_hint, accepted)
