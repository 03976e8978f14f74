"""Our policy given the true waits: what any prediction can be measured against."""

from __future__ import annotations

import msgspec

from tiering.policy.priced import Foresight, PricedPolicy
from tiering.policy.valuation import PricedParameters


def oracle_policy(waits: Foresight, parameters: PricedParameters | None = None) -> PricedPolicy:
    """waits: the true wait in seconds after a session's turn; inf if it never comes back.

    Nothing guards against wrong predictions: holding ends where it is best, and reloads are always hidden.
    """
    given = parameters or PricedParameters()
    sure = msgspec.structs.replace(given, robustness=1e-6, hidden=1.0)
    return PricedPolicy(sure, foresight=waits, name="oracle")
