"""Where KV is, for operators: of one session, and of the tiers as a whole."""

from __future__ import annotations

import math
from itertools import islice

from agentserve.messages import Decided, Decisions, SessionView
from agentserve.server.engine_port import SeenSession, TierReport
from agentserve.server.http.context import ServerContext
from agentserve.server.sessions.session_record import MOST_NAMES, Session
from agentserve.server.text_port import JsonObject
from agentserve.types import SessionState
from tiering.policy.base import Residency


def placement(context: ServerContext, session: Session, seen: SeenSession | None) -> JsonObject:
    """What a session's worker says of its KV and of the policy's last decision about it.

    Numbers of `residency` are blocks. Values are null where there are no tiers, where nothing was decided
    yet, and where no worker knows the session. `as_of` is when its worker said so; where it does not answer
    now, that is `old`. What it waits for is known without one.
    """
    view = seen.view if seen is not None else None
    waits = session.state is SessionState.WAITING_TOOL
    outstanding = [call.name for call in islice(session.pending.values(), MOST_NAMES)] if waits else []
    residency, decision, rested = None, None, None
    if view is not None and view.residency is not None:
        residency = _blocks(view.residency)
    if view is not None and view.decision:
        until = view.until
        decision = {
            "choice": view.decision,
            "reason": view.reason,
            "price": _finite(view.price),
            "until": round(context.unix(until), 6) if until is not None and until < NEVER else None,
        }
    if view is not None and view.rested > 0:
        rested = round(context.unix(view.rested), 6)
    return {
        "residency": residency,
        "decision": decision,
        "rested_at": rested,
        "waiting_for": list(view.tools) if view is not None and view.tools else outstanding,
        "as_of": round(context.unix(seen.at), 6) if seen is not None and seen.at is not None else None,
        "old": seen is not None and seen.old,
    }


def decisions(context: ServerContext, view: SessionView | None) -> list[JsonObject]:
    """What the policy decided about a session of late, oldest first, and where its blocks were each time."""
    return [_decision(context, made) for made in (view.decisions if view is not None else ())]


def follow_decisions(context: ServerContext) -> None:
    """Tell of decisions in the events of the sessions that they are about, as workers make them."""

    def hear(decisions: Decisions) -> None:
        for key, untold, made in decisions.made:
            session = context.directory.find(key)
            if session is not None:
                context.chronicle.say(session, "decision", **_decision(context, made), untold=untold)

    context.engine.on_decisions(hear)


def _decision(context: ServerContext, made: Decided) -> JsonObject:
    return {
        "at": round(context.unix(made.at), 6),
        "choice": made.choice,
        "reason": made.reason,
        "price": _finite(made.price),
        "residency": _blocks(made.residency),
    }


def _finite(price: float) -> float | None:
    """JSON has no word for what a policy may say of a price."""
    return price if math.isfinite(price) else None


def _blocks(residency: Residency) -> JsonObject:
    return {
        "device": residency.device,
        "host": residency.host,
        "disk": residency.disk,
        "gone": residency.gone,
        "copied": residency.copied,
    }


NEVER = 1e15  # seconds; a policy says infinity for "only if something happens", which JSON cannot


def tiers_health(context: ServerContext) -> JsonObject:
    """The tiers that are in use and in what condition, as workers last said; asks nobody."""
    reports = context.engine.tiers()
    found: JsonObject = {"device": {"state": "ok"}}
    host = [report.view for report in reports if report.view.host_slots]
    if host:
        found["host"] = {
            "state": "ok",
            "bytes": sum(view.host * view.block_bytes for view in host),
            "capacity_bytes": sum(view.host_slots * view.block_bytes for view in host),
        }
    disk = [report for report in reports if report.view.disk_budget or report.view.disk_error]
    if disk:
        found["disk"] = _disk(context, disk)
    if reports:
        found["policy"] = reports[0].view.policy
    return found


def _disk(context: ServerContext, reports: list[TierReport]) -> JsonObject:
    state: JsonObject = {
        "state": "ok",
        "bytes": sum(report.view.disk_bytes for report in reports),
        "capacity_bytes": sum(report.view.disk_budget for report in reports),
    }
    failing = [report for report in reports if report.view.disk_error]
    if failing:
        since = [report.disk_failing_since for report in failing if report.disk_failing_since is not None]
        state["state"] = "failing"
        state["reason"] = failing[0].view.disk_error
        state["since"] = round(context.unix(min(since)), 6) if since else None
        state["workers"] = [report.worker for report in failing]
    return state
