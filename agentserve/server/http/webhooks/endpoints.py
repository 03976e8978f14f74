"""/v1/webhook_endpoints: where events go. As OpenAI's; switching one off and on, and its log, are ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from agentserve.server.errors import ApiError, json_response
from agentserve.server.http.callers import tenant_of
from agentserve.server.http.context import context_of
from agentserve.server.http.reading import read_body
from agentserve.server.http.responses.lists import page, wanted
from agentserve.server.http.schemas import decode
from agentserve.server.http.webhooks.failures import told
from agentserve.server.http.webhooks.schemas import (
    EndpointRequest,
    EndpointUpdate,
    RotateRequest,
    TestRequest,
)
from agentserve.server.http.webhooks.shown import delivery_object, endpoint_object
from agentserve.server.text_port import JsonObject
from agentserve.server.webhooks.hooks import Hooks
from agentserve.server.webhooks.payloads import EVENT_TYPES, event, new_event_id, sample
from tools_bridge.webhooks.types import Delivery, Endpoint, Key, WebhookError

KEEP_SECONDS = 86400.0  # of an old secret beside the new one, where its owner wants that
BY_OWNER = "by its owner"
Body = TypeVar("Body")


async def create_endpoint(request: Request) -> Response:
    """The reply has the signing secret, which is never shown again."""
    body = await _body(request, EndpointRequest)
    _check_types(body.event_types)
    hooks = hooks_of(request)
    try:
        endpoint, secret = await hooks.outbox.create_endpoint(
            tenant_of(request), body.name, body.url, body.event_types, body.payload
        )
    except WebhookError as error:
        raise told(error) from None
    return _told(hooks, endpoint, secret)


async def list_endpoints(request: Request) -> Response:
    """Newest first; `after`, `limit` and `order`."""
    hooks = hooks_of(request)
    shown = [_shown(hooks, endpoint) for endpoint in hooks.endpoints(tenant_of(request))]
    return json_response(page(shown, wanted(request)))


async def get_endpoint(request: Request) -> Response:
    return _told(hooks_of(request), endpoint_of(request))


async def update_endpoint(request: Request) -> Response:
    """What is pending goes to the new URL."""
    endpoint_of(request)
    body = await _body(request, EndpointUpdate)
    if body.event_types is not None:
        _check_types(body.event_types)
    hooks, endpoint = hooks_of(request), endpoint_of(request)
    try:
        changed = await hooks.courier.update(
            endpoint.id, name=body.name, url=body.url, event_types=body.event_types, form=body.payload
        )
    except WebhookError as error:
        raise told(error) from None
    return _told(hooks, changed)


async def delete_endpoint(request: Request) -> Response:
    """What was to be delivered to it is given up; calls of tools that wait for that have failed."""
    endpoint = endpoint_of(request)
    await hooks_of(request).courier.delete(endpoint.id)
    return json_response({"id": endpoint.id, "object": "webhook_endpoint.deleted", "deleted": True})


async def rotate_secret(request: Request) -> Response:
    """The old secret signs beside the new one for a day, or no longer."""
    endpoint_of(request)
    body = await _body(request, RotateRequest)
    hooks, endpoint = hooks_of(request), endpoint_of(request)
    keep = KEEP_SECONDS if body.keep_old_secret_active_for_24_hours else 0.0
    try:
        changed, secret = await hooks.outbox.rotate_secret(endpoint.id, keep)
    except WebhookError as error:
        raise told(error) from None
    return _told(hooks, changed, secret)


async def try_endpoint(request: Request) -> Response:
    """Send a sample event now, once; nothing is kept of it."""
    endpoint_of(request)
    body = await _body(request, TestRequest)
    _check_types([body.event_type], "event_type")
    hooks, endpoint = hooks_of(request), endpoint_of(request)
    id_ = new_event_id()
    content = event(id_, body.event_type, hooks.wall(), sample(body.event_type))
    tested = await hooks.courier.test(endpoint.id, id_, content)
    if tested.status is None:
        raise ApiError(f"The endpoint did not answer: {tested.error}.", code="webhook_test_failed")
    shown = {
        "object": "webhook_endpoint.test",
        "webhook_endpoint_id": endpoint.id,
        "event_type": body.event_type,
        "success": True,
        "status_code": tested.status,
    }
    return json_response(shown)


async def disable_endpoint(request: Request) -> Response:
    """Nothing is delivered until it is enabled; what is pending is given up."""
    hooks, endpoint = hooks_of(request), endpoint_of(request)
    await hooks.courier.disable(endpoint.id, BY_OWNER)
    return _told(hooks, endpoint_of(request))


async def enable_endpoint(request: Request) -> Response:
    """Also one that was disabled because its receiver answered 410."""
    hooks, endpoint = hooks_of(request), endpoint_of(request)
    try:
        return _told(hooks, await hooks.courier.enable(endpoint.id))
    except WebhookError as error:
        raise told(error) from None


async def event_types(request: Request) -> Response:
    return json_response({"object": "list", "data": list(EVENT_TYPES)})


async def list_deliveries(request: Request) -> Response:
    """What is owed to the endpoint, and the latest of what was: newest first."""
    hooks = hooks_of(request)
    found = hooks.ledger.of_endpoint(endpoint_of(request).id)
    shown = [delivery_object(one, hooks.courier.unix) for one in reversed(found)]
    return json_response(page(shown, wanted(request)))


async def get_delivery(request: Request) -> Response:
    return json_response(delivery_object(_delivery_of(request), hooks_of(request).courier.unix))


async def replay_delivery(request: Request) -> Response:
    """Deliver it once more, under its own id. Nobody waits for what a tool's call answers then."""
    hooks, delivery = hooks_of(request), _delivery_of(request)
    try:
        await hooks.courier.replay(delivery.key)
        return json_response(delivery_object(hooks.ledger.delivery(delivery.key), hooks.courier.unix))
    except WebhookError as error:
        raise told(error) from None


def hooks_of(request: Request) -> Hooks:
    return context_of(request).hooks


def endpoint_of(request: Request) -> Endpoint:
    """Look again after every `await`."""
    try:
        return hooks_of(request).endpoint(tenant_of(request), request.path_params["id"])
    except WebhookError as error:
        raise told(error) from None


def _delivery_of(request: Request) -> Delivery:
    endpoint = endpoint_of(request)
    try:
        return hooks_of(request).ledger.delivery(Key(endpoint.id, request.path_params["event"]))
    except WebhookError as error:
        raise told(error) from None


async def _body(request: Request, kind: type[Body]) -> Body:
    limits = context_of(request).options.limits
    return decode(await read_body(request, limits.body_bytes) or b"{}", kind, limits)


def _check_types(types: Sequence[str], param: str = "event_types") -> None:
    for name in types:
        if name not in EVENT_TYPES:
            raise ApiError(
                f"{param}: {name[:80]!r} is no event of this server (GET /v1/webhook_event_types)",
                param=param,
                code="invalid_value",
            )


def _shown(hooks: Hooks, endpoint: Endpoint, secret: str | None = None) -> JsonObject:
    return endpoint_object(endpoint, hooks.courier.circuit(endpoint.id), hooks.courier.unix, secret)


def _told(hooks: Hooks, endpoint: Endpoint, secret: str | None = None) -> Response:
    return json_response(_shown(hooks, endpoint, secret))
