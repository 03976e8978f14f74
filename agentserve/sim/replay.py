"""Replaying a recorded log: the same inputs must give the same plans.

A log is written by a worker (`serve --record`) or by a simulation. Its inputs are fed to a new
core in their order and with their times; every plan's digest is compared with the recorded one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from agentserve.core.config import CoreConfig
from agentserve.core.engine import EngineCore
from agentserve.core.market import TierParts, TierSetup
from agentserve.core.plan import Plan
from agentserve.core.record import (
    RECORD_VERSION,
    Commanded,
    Cut,
    Entry,
    Failed,
    Finished,
    Opened,
    Ordered,
    Planned,
    Ticked,
    Transferred,
    orders_digest,
    plan_digest,
)
from tiering.policy.registry import policy_named
from tiering.prices import PriceBook


class ReplayError(ValueError):
    """The log cannot be replayed: it is not one, or does not begin with how the core was built."""


class Replay(msgspec.Struct, frozen=True):
    plans: int  # plans compared
    commands: int
    differs_at: int | None  # number of the first plan that came out otherwise; nothing after it was run
    cut: bool = False  # the log ends in the middle of an entry: its process was killed


def named_parts(setup: TierSetup) -> TierParts:
    """The policy and the price book that a worker begins with. ReplayError for an unknown policy."""
    try:
        policy = policy_named(setup.policy, setup.prices)
    except ValueError as error:
        raise ReplayError(str(error)) from None
    return TierParts(setup, policy, PriceBook(setup.prices))


def replay(entries: Iterable[Entry], parts: Callable[[TierSetup], TierParts] | None = None) -> Replay:
    """Feed a log into a new core, built as the log says.

    parts: makes the policy and the price book that a log with tiers names, in their first state.
    """
    stream = iter(entries)
    opened = next(stream, None)
    if not isinstance(opened, Opened):
        raise ReplayError("the log does not begin with an opened entry")
    if opened.version != RECORD_VERSION:
        raise ReplayError(f"the log has version {opened.version}, this is {RECORD_VERSION}")
    config = msgspec.msgpack.decode(opened.config, type=CoreConfig)
    tiers = None
    if opened.tiers is not None:
        if parts is None:
            raise ReplayError(f"the log has tiers, and no policy {opened.tiers.policy} is at hand")
        tiers = parts(opened.tiers)
    core = EngineCore(config, opened.groups, opened.pages, opened.cost, tiers)
    plan: Plan | None = None
    plans = commands = 0
    for entry in stream:
        match entry:
            case Planned(now=now, plan=recorded):
                plan = core.begin_step(now)
                if plan_digest(plan) != recorded:
                    return Replay(plans, commands, plans)
                plans += plan is not None
            case Ordered(transfers=digest):
                if orders_digest(core.take_transfers(), core.take_changes()) != digest:
                    return Replay(plans, commands, plans)
            case Cut():
                return Replay(plans, commands, None, cut=True)
            case _:
                commands += isinstance(entry, Commanded)
                _feed(core, entry, plan)
        core.take_events()
    return Replay(plans, commands, None)


def _feed(core: EngineCore, entry: Entry, plan: Plan | None) -> None:
    """One input of the log, other than the wish for a plan. plan: the one begun last."""
    match entry:
        case Commanded(now=now, command=command):
            core.handle(command, now)
        case Finished(now=now, result=result):
            core.finish_step(result, now)
        case Failed(now=now, error=error):
            if plan is None:
                raise ReplayError("a step failed that was never planned")
            core.fail_step(plan, error, now)
        case Transferred(now=now, done=done):
            core.finish_transfers(done, now)
        case Ticked(now=now):
            core.tick(now)
        case _:
            raise ReplayError("the log has a second opened entry")
