"""Policies by the names that settings and reports use."""

from __future__ import annotations

from collections.abc import Callable

from tiering.policy.base import Policy, Prices
from tiering.policy.lru import LruPolicy
from tiering.policy.priced import PricedPolicy

_POLICIES: dict[str, Callable[[Prices], Policy]] = {
    "priced": lambda prices: PricedPolicy(),
    "lru": lambda prices: LruPolicy(),
}


def policy_names() -> tuple[str, ...]:
    return tuple(_POLICIES)


def policy_named(name: str, prices: Prices) -> Policy:
    """A new policy of this name. Raises ValueError, in one line, if there is none."""
    build = _POLICIES.get(name)
    if build is None:
        raise ValueError(f"unknown tier policy {name[:64]!r}; there are: {', '.join(_POLICIES)}")
    return build(prices)
