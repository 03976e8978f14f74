"""What operators see of the core: a worker, its sessions, its tiers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from agentserve.core.kv import KVManager
from agentserve.core.ledger import Known
from agentserve.core.scheduler import Scheduler
from agentserve.core.session import Session
from agentserve.messages import AheadCounts, GroupPages, PreemptionCounts, SessionView, TiersView, WorkerView
from tiering.manager import TierManager
from tiering.policy.base import Choice, Policy, Residency, Watched
from tiering.types import Tier


def worker_view(
    scheduler: Scheduler,
    sessions: int,
    kv: KVManager,
    tiers: TiersView | None,
    counts: tuple[AheadCounts, PreemptionCounts],
) -> WorkerView:
    """Page counts are of the tightest group; pages that only transfers hold are neither live nor cached."""
    pool = min(kv.pools, key=lambda pool: pool.available)
    return WorkerView(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        sessions=sessions,
        pages=pool.pages,
        pages_free=pool.free,
        pages_cached=pool.idle,
        pages_live=pool.live - kv.pinned,
        tiers=tiers,
        ahead=counts[0],
        groups=tuple(GroupPages(pool.live, pool.idle, pool.free) for pool in kv.pools),
        promises=scheduler.time.counts(),
        preempted=counts[1],
    )


def session_view(session: Session, kv: KVManager) -> SessionView:
    """Of a session at rest: how much of it has KV in the cache now."""
    computed, pages = session.computed, kv.blocks_of(session.id)
    if session.turn is None and session.tokens:
        computed = kv.cached_tokens(session.namespace, session.tokens)
        pages = -(-computed // kv.page_size)
    return SessionView(
        session.id,
        session.state,
        session.last_turn,
        len(session.tokens),
        computed,
        pages,
        session.preemptions,
    )


def tiers_view(
    policy: Policy,
    manager: TierManager,
    kv: KVManager,
    *,
    watched: Watched | None,
    hits: Mapping[Tier, int],
    choices: Mapping[Choice, int],
) -> TiersView:
    """watched: the policy, if it has figures. hits: prompt tokens found, by tier. choices: decisions so
    far, by choice."""
    return TiersView(
        policy=policy.name,
        host=0 if manager.staging else manager.host_used,  # what passes through is in no tier yet
        host_slots=0 if manager.staging else manager.host_slots,
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
        waits=dict(watched.predicted) if watched is not None else {},
        takeovers=watched.takeovers if watched is not None else 0,
        disk_error=manager.health.error,
        faults={fault.value: count for fault, count in manager.health.faults.items()},
    )


def resting_view(view: SessionView, known: Known, residency: Residency) -> SessionView:
    """A session at rest: where its KV is, and what was decided last."""
    view = msgspec.structs.replace(
        view,
        residency=residency,
        rested=known.since,
        tools=known.tools,
        decisions=tuple(known.decisions),
    )
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
