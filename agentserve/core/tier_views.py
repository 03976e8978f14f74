"""What operators see of the tiers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from agentserve.core.kv import KVManager
from agentserve.core.ledger import Known
from agentserve.messages import SessionView, TiersView
from tiering.manager import TierManager
from tiering.policy.base import Choice, Policy, Residency
from tiering.types import Tier


def tiers_view(
    policy: Policy,
    manager: TierManager,
    kv: KVManager,
    hits: Mapping[Tier, int],
    choices: Mapping[Choice, int],
) -> TiersView:
    """hits: prompt tokens found, by tier. choices: decisions so far, by choice."""
    takeovers = getattr(policy, "takeovers", 0)  # of policies that have a plain one to fall back on
    return TiersView(
        policy=policy.name,
        host=manager.host_used,
        host_slots=manager.host_slots,
        disk=manager.disk_blocks,
        disk_bytes=manager.disk_used,
        disk_budget=manager.disk_bytes,
        block_bytes=manager.block_bytes,
        moving=manager.moving,
        pinned=kv.pinned,
        hit_tokens={tier.value: tokens for tier, tokens in hits.items()},
        moved={move.value: moved for move, moved in manager.moved.items()},
        failed={move.value: count for move, count in manager.failed.items()},
        evicted={
            Tier.DEVICE.value: kv.evicted,
            **{tier.value: count for tier, count in manager.evicted.items()},
        },
        decisions={choice.value: count for choice, count in choices.items()},
        takeovers=takeovers if isinstance(takeovers, int) else 0,
        disk_error=manager.disk_error,
    )


def resting_view(view: SessionView, known: Known, residency: Residency) -> SessionView:
    """A session at rest: where its KV is, and what was decided last."""
    view = msgspec.structs.replace(view, residency=residency, rested=known.since, tools=known.tools)
    decision = known.decision
    if decision is None or not known.told:
        return view
    return msgspec.structs.replace(
        view,
        decision=decision.choice.value,
        reason=decision.reason,
        price=decision.price,
        until=decision.until if math.isfinite(decision.until) else None,
    )
