"""Where this dialect is served."""

from __future__ import annotations

from starlette.routing import Route

from agentserve.server.http.responses import conversation_routes as conversations
from agentserve.server.http.responses import create, retrieve

_ONE = "/v1/responses/{id}"
_CONVERSATION = "/v1/conversations/{id}"


def routes() -> list[Route]:
    return [
        Route("/v1/responses", create.create_response, methods=["POST"]),
        Route("/v1/responses/input_tokens", create.count_input, methods=["POST"]),
        Route("/v1/responses/compact", create.compact, methods=["POST"]),
        Route(_ONE, retrieve.get_response, methods=["GET"]),
        Route(_ONE, retrieve.delete_response, methods=["DELETE"]),
        Route(f"{_ONE}/cancel", retrieve.cancel_response, methods=["POST"]),
        Route(f"{_ONE}/input_items", retrieve.input_items, methods=["GET"]),
        Route("/v1/conversations", conversations.create_conversation, methods=["POST"]),
        Route(_CONVERSATION, conversations.get_conversation, methods=["GET"]),
        Route(_CONVERSATION, conversations.update_conversation, methods=["POST"]),
        Route(_CONVERSATION, conversations.delete_conversation, methods=["DELETE"]),
        Route(f"{_CONVERSATION}/items", conversations.list_items, methods=["GET"]),
        Route(f"{_CONVERSATION}/items", conversations.add_items, methods=["POST"]),
        Route(f"{_CONVERSATION}/items/{{item}}", conversations.get_item, methods=["GET"]),
        Route(f"{_CONVERSATION}/items/{{item}}", conversations.delete_item, methods=["DELETE"]),
    ]
