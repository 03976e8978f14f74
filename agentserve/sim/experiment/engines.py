"""Who takes part: a scheduling policy by name, with or without tiers and prefix cache."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agentserve.core.config import CoreConfig
from agentserve.core.engine import EngineCore
from agentserve.core.market import TierParts, TierSetup
from agentserve.core.scheduling.registry import policy_names
from agentserve.core.scheduling.settings import DEFAULT_POLICY, SchedulingConfig
from agentserve.sim.experiment.clients import Promises
from agentserve.sim.experiment.record import Pace, Promise
from agentserve.sim.experiment.script import Turn
from agentserve.sim.hardware import Hardware
from agentserve.types import KVGroup
from tiering.policy.registry import policy_named
from tiering.prices import PriceBook

OURS, OURS_ALONE = "ours", "ours-no-tiers"


class Entrant(msgspec.Struct, frozen=True):
    """One way to run the engine. `policy` is a name in the scheduler's registry."""

    name: str
    policy: str
    tiers: bool = False
    prefix_cache: bool = True
    tokens: int | None = None  # per step; None: the machine's


LADDER = (
    Entrant("no-cache", "chunked", prefix_cache=False),
    Entrant("fcfs", "fcfs"),
    Entrant("decode-first", "decode-first"),
    Entrant("chunked", "chunked"),
    Entrant("prefix-aware", "prefix-aware"),
    Entrant("chunked-tiers", "chunked", tiers=True),
    Entrant(OURS_ALONE, DEFAULT_POLICY),
    Entrant(OURS, DEFAULT_POLICY, tiers=True),
)
"""Each step adds one thing; the two before the last tell what is the scheduler's and what the tiers'."""


def entrant_named(name: str) -> Entrant:
    """One of the ladder, or any policy of the registry: `POLICY`, `POLICY+tiers`, each also with `@TOKENS`
    per step. Raises ValueError, in one line."""
    plain, _, tokens = name.partition("@")
    if tokens and not (tokens.isascii() and tokens.isdigit() and 0 < int(tokens) < 1 << 30):
        raise ValueError(f"{name[:64]}: expected a number of tokens after @")
    known = {entrant.name: entrant for entrant in LADDER}
    policy, _, more = plain.partition("+")
    if plain in known:
        found = known[plain]
    elif policy in policy_names() and more in ("", "tiers"):
        found = Entrant(plain, policy, tiers=bool(more))
    else:
        names = ", ".join(dict.fromkeys((*known, *policy_names())))
        raise ValueError(f'no policy "{name[:64]}"; there are: {names}')
    if tokens:
        found = msgspec.structs.replace(found, name=name, tokens=int(tokens))
    return found


def core_config(
    hardware: Hardware, entrant: Entrant, weights: Mapping[str, float], longest: int
) -> CoreConfig:
    """longest: tokens that a context may come to."""
    config = CoreConfig(
        page_size=hardware.page_size,
        max_model_len=longest,
        max_num_seqs=hardware.max_num_seqs,
        max_batched_tokens=hardware.max_batched_tokens,
    )
    return configured(config, entrant, weights)


def configured(config: CoreConfig, entrant: Entrant, weights: Mapping[str, float]) -> CoreConfig:
    """A core's configuration with what an entrant decides of it."""
    return msgspec.structs.replace(
        config,
        max_batched_tokens=entrant.tokens or config.max_batched_tokens,
        prefix_cache=entrant.prefix_cache,
        scheduling=SchedulingConfig(policy=entrant.policy, weights=dict(weights)),
    )


def build_core(
    hardware: Hardware, entrant: Entrant, weights: Mapping[str, float], longest: int
) -> EngineCore:
    """A core of an imagined machine. Raises ValueError if there is no such policy."""
    parts = None
    if entrant.tiers:
        prices = hardware.prices()
        setup = TierSetup(
            policy="priced",
            host_slots=hardware.host_kv // hardware.block_bytes,
            disk_bytes=hardware.disk_kv,
            block_bytes=hardware.block_bytes,
            prices=prices,
        )
        parts = TierParts(setup, policy_named("priced", prices), PriceBook(prices))
    config = core_config(hardware, entrant, weights, longest)
    groups = (KVGroup("full", (0,), hardware.block_bytes),)
    return EngineCore(config, groups, (hardware.pages,), hardware.step_cost(), parts)


class SloRule(msgspec.Struct, frozen=True):
    """Promises from what a request takes on a machine that has nothing else to do: so many times its first
    token's time, at least `least_ttft` seconds, and so many times a decode step at its longest context."""

    times: float = 5.0
    least_ttft: float = 1.0
    ttft: float | None = None  # instead, for every request
    tbt: float | None = None
    pace: Pace = Pace.GAPS


def promises(hardware: Hardware, rule: SloRule) -> Promises:
    """A session's earlier context counts as found in the cache: whoever lost it is late."""

    def promise(context: int, turn: Turn) -> Promise:
        alone = hardware.step([(context, turn.fresh)])
        decode = hardware.step([(context + turn.fresh + turn.output, 1)])
        return Promise(
            rule.ttft or max(rule.least_ttft, rule.times * alone), rule.tbt or rule.times * decode, rule.pace
        )

    return promise
