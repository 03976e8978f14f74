"""Shapes of the webhook routes' replies, for `/openapi.json`; a test holds real replies against these."""

from __future__ import annotations

from typing import Literal

import msgspec

from agentserve.server.text_port import JsonObject


class WebhookEndpointReply(msgspec.Struct, kw_only=True):
    """The last three are ours. `disabled`: why it is not used; null: it is."""

    id: str
    object: Literal["webhook_endpoint"]
    name: str
    url: str
    event_types: list[str]
    created_at: int
    updated_at: int
    signing_secret_hint: str
    payload: Literal["thin", "full"]
    disabled: str | None
    circuit: Literal["closed", "open", "half_open"]


class WebhookSecretReply(WebhookEndpointReply, kw_only=True):
    """The one reply that has the secret."""

    signing_secret: str


class WebhookEndpointList(msgspec.Struct):
    object: Literal["list"]
    data: list[WebhookEndpointReply]
    first_id: str | None
    last_id: str | None
    has_more: bool


class WebhookEventTypes(msgspec.Struct):
    object: Literal["list"]
    data: list[str]


class WebhookTestReply(msgspec.Struct):
    object: Literal["webhook_endpoint.test"]
    webhook_endpoint_id: str
    event_type: str
    success: Literal[True]
    status_code: int


class WebhookDeliveryReply(msgspec.Struct, kw_only=True):
    """`id` is the event's. `status`: why it was given up, as `reason`."""

    id: str
    object: Literal["webhook_endpoint.delivery"]
    webhook_endpoint_id: str
    event_type: str
    kind: Literal["tool", "lifecycle"]
    status: Literal["pending", "delivered", "failed"]
    reason: str | None
    detail: str | None
    created_at: float
    next_attempt_at: float | None
    expires_at: float | None
    completed_at: float | None
    tries: int
    replays: int
    attempts: list[JsonObject]


class WebhookDeliveryList(msgspec.Struct):
    object: Literal["list"]
    data: list[WebhookDeliveryReply]
    first_id: str | None
    last_id: str | None
    has_more: bool
