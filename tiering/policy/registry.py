"""Policies by the names that settings and reports use, and what of each a sweep may tune."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from tiering.policy.base import Policy, Prices
from tiering.policy.continuum import ContinuumParameters, ContinuumPolicy
from tiering.policy.infercept import InferCeptParameters, InferCeptPolicy
from tiering.policy.lru import LruPolicy
from tiering.policy.mori import MoriParameters, MoriPolicy
from tiering.policy.oracle import oracle_policy
from tiering.policy.pin import PinParameters, PinPolicy
from tiering.policy.priced import Foresight, PricedPolicy
from tiering.policy.thunderagent import ThunderAgentParameters, ThunderAgentPolicy
from tiering.policy.valuation import PricedParameters


class NoParameters(msgspec.Struct, frozen=True):
    """There is nothing to tune."""


Parameters = (
    PricedParameters
    | PinParameters
    | InferCeptParameters
    | ContinuumParameters
    | ThunderAgentParameters
    | MoriParameters
    | NoParameters
)

# Published values are the defaults. `oracle` is not here: it needs to be told the future.
DEFAULTS: Mapping[str, Parameters] = MappingProxyType(
    {
        "priced": PricedParameters(),
        "lru": NoParameters(),
        "pin": PinParameters(),
        "infercept": InferCeptParameters(),
        "continuum": ContinuumParameters(),
        "thunderagent": ThunderAgentParameters(),
        "mori": MoriParameters(),
    }
)


def policy_names() -> tuple[str, ...]:
    """Policies that can serve."""
    return tuple(DEFAULTS)


def policy_named(
    name: str, prices: Prices, *, parameters: Parameters | None = None, waits: Foresight | None = None
) -> Policy:
    """A new policy of this name.

    prices: at the start; policies read the current ones from the market that they are asked about.
    parameters: other than the defaults; waits: the true waits, for `oracle` alone.
    Raises ValueError, in one line, for an unknown name, foreign parameters, or an oracle without waits.
    """
    if name == "oracle":
        if waits is None:
            raise ValueError("the policy 'oracle' needs the true waits: it runs in simulations only")
        if parameters is not None and not isinstance(parameters, PricedParameters):
            raise ValueError("the policy 'oracle' takes the parameters of 'priced'")
        return oracle_policy(waits, parameters)
    default = DEFAULTS.get(name)
    if default is None:
        raise ValueError(f"unknown tier policy {name[:64]!r}; there are: {', '.join(DEFAULTS)}")
    chosen = default if parameters is None else parameters
    if type(chosen) is not type(default):
        raise ValueError(f"the policy {name!r} takes {type(default).__name__}, not {type(chosen).__name__}")
    return _build(chosen)


def _build(parameters: Parameters) -> Policy:
    match parameters:
        case PricedParameters():
            return PricedPolicy(parameters)
        case PinParameters():
            return PinPolicy(parameters)
        case InferCeptParameters():
            return InferCeptPolicy(parameters)
        case ContinuumParameters():
            return ContinuumPolicy(parameters)
        case ThunderAgentParameters():
            return ThunderAgentPolicy(parameters)
        case MoriParameters():
            return MoriPolicy(parameters)
        case NoParameters():
            return LruPolicy()
