"""Endpoints and deliveries as clients see them. Pure."""

from __future__ import annotations

from collections.abc import Callable

from agentserve.server.text_port import JsonObject
from agentserve.server.webhooks.payloads import FULL, THIN
from tools_bridge.webhooks.breaker import Circuit
from tools_bridge.webhooks.types import Attempt, Delivery, Endpoint, GaveUp, State

Unix = Callable[[float], float]
"""A moment that was kept, as Unix time."""


def endpoint_object(
    endpoint: Endpoint, circuit: Circuit, unix: Unix, secret: str | None = None
) -> JsonObject:
    """`secret`: where it is told, this once."""
    shown: JsonObject = {
        "id": endpoint.id,
        "object": "webhook_endpoint",
        "name": endpoint.name,
        "url": endpoint.url,
        "event_types": list(endpoint.event_types),
        "created_at": int(unix(endpoint.created)),
        "updated_at": int(unix(endpoint.updated)),
        "signing_secret_hint": endpoint.secret_hint,
        "payload": FULL if endpoint.form == FULL else THIN,
        "disabled": endpoint.disabled or None,
        "circuit": circuit.value,
    }
    return shown if secret is None else {**shown, "signing_secret": secret}


def delivery_object(delivery: Delivery, unix: Unix) -> JsonObject:
    """Neither what was sent nor what was answered is in it."""
    pending = delivery.state is State.PENDING
    ending = delivery.ending
    gave_up = ending if isinstance(ending, GaveUp) else None
    return {
        "id": delivery.event,
        "object": "webhook_endpoint.delivery",
        "webhook_endpoint_id": delivery.endpoint,
        "event_type": delivery.type,
        "kind": delivery.kind.value,
        "status": "pending" if pending else "failed" if gave_up else "delivered",
        "reason": gave_up.why.value if gave_up else None,
        "detail": (gave_up.detail or None) if gave_up else None,
        "created_at": round(unix(delivery.created), 3),
        "next_attempt_at": round(unix(delivery.next_at), 3) if pending else None,
        "expires_at": None if delivery.deadline is None else round(unix(delivery.deadline), 3),
        "completed_at": None if pending else round(unix(delivery.ended), 3),
        "tries": delivery.tries,
        "replays": delivery.replays,
        "attempts": [_attempt(attempt, unix) for attempt in delivery.attempts],
    }


def _attempt(attempt: Attempt, unix: Unix) -> JsonObject:
    return {
        "at": round(unix(attempt.at), 3),
        "seconds": round(attempt.seconds, 3),
        "status_code": attempt.status,
        "error": attempt.error or None,
    }
