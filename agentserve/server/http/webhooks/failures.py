"""What the delivering part refuses, as the API says it."""

from __future__ import annotations

from agentserve.server.errors import ApiError
from tools_bridge.webhooks.outbox import BadEndpoint
from tools_bridge.webhooks.types import (
    Conflict,
    EndpointDisabled,
    EventTooLarge,
    NotKept,
    OutboxFull,
    UnknownDelivery,
    UnknownEndpoint,
    WebhookError,
)

_RETRY = {"retry-after": "5", "x-should-retry": "true"}
_KNOWN: dict[type[WebhookError], tuple[int, str]] = {
    BadEndpoint: (400, "invalid_webhook_endpoint"),
    UnknownEndpoint: (404, "webhook_endpoint_not_found"),
    UnknownDelivery: (404, "webhook_delivery_not_found"),
    EndpointDisabled: (409, "webhook_endpoint_disabled"),
    Conflict: (409, "webhook_delivery_pending"),
    EventTooLarge: (413, "webhook_event_too_large"),
    OutboxFull: (429, "rate_limit_exceeded"),
    NotKept: (503, "storage_failed"),
}


def told(error: WebhookError, param: str | None = None) -> ApiError:
    status, code = _KNOWN.get(type(error), (500, "internal_error"))
    headers = _RETRY if status in (429, 503) else None
    text = str(error)
    message = text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
    return ApiError(message, status=status, param=param, code=code, headers=headers)
