"""Where webhooks are served."""

from __future__ import annotations

from starlette.routing import Route

from agentserve.server.http.webhooks import callbacks, endpoints
from agentserve.server.webhooks.hooks import CALLBACKS

_ALL = "/v1/webhook_endpoints"
_ONE = f"{_ALL}/{{id}}"


def routes() -> list[Route]:
    return [
        Route(_ALL, endpoints.create_endpoint, methods=["POST"]),
        Route(_ALL, endpoints.list_endpoints, methods=["GET"]),
        Route(_ONE, endpoints.get_endpoint, methods=["GET"]),
        Route(_ONE, endpoints.update_endpoint, methods=["POST"]),
        Route(_ONE, endpoints.delete_endpoint, methods=["DELETE"]),
        Route(f"{_ONE}/rotate_secret", endpoints.rotate_secret, methods=["POST"]),
        Route(f"{_ONE}/test", endpoints.try_endpoint, methods=["POST"]),
        Route(f"{_ONE}/disable", endpoints.disable_endpoint, methods=["POST"]),
        Route(f"{_ONE}/enable", endpoints.enable_endpoint, methods=["POST"]),
        Route(f"{_ONE}/deliveries", endpoints.list_deliveries, methods=["GET"]),
        Route(f"{_ONE}/deliveries/{{event}}", endpoints.get_delivery, methods=["GET"]),
        Route(f"{_ONE}/deliveries/{{event}}/replay", endpoints.replay_delivery, methods=["POST"]),
        Route("/v1/webhook_event_types", endpoints.event_types, methods=["GET"]),
        Route(f"{CALLBACKS}{{token}}", callbacks.tool_callback, methods=["POST"]),
    ]
