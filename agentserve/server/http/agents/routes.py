"""Where this dialect is served."""

from __future__ import annotations

from starlette.routing import Route

from agentserve.server.http.agents import inputs, lists, saved, sessions, stream

_ALL = "/v1/agents/sessions"
_ONE = f"{_ALL}/{{id}}"


def routes() -> list[Route]:
    return [
        Route(_ALL, sessions.create_session, methods=["POST"]),
        Route(_ALL, sessions.list_sessions, methods=["GET"]),
        Route(_ONE, sessions.get_session, methods=["GET"]),
        Route(_ONE, sessions.update_session, methods=["POST"]),
        Route(_ONE, sessions.delete_session, methods=["DELETE"]),
        Route(f"{_ONE}/events", inputs.send_events, methods=["POST"]),
        Route(f"{_ONE}/events", stream.follow_events, methods=["GET"]),
        Route(f"{_ONE}/items", lists.list_items, methods=["GET"]),
        Route(f"{_ONE}/turns", lists.list_turns, methods=["GET"]),
        Route(f"{_ONE}/turns/{{turn}}", lists.get_turn, methods=["GET"]),
        Route(f"{_ONE}/turns/{{turn}}/items", lists.list_turn_items, methods=["GET"]),
        Route("/v1/agents", saved.create_agent, methods=["POST"]),
        Route("/v1/agents", saved.list_agents, methods=["GET"]),
        Route("/v1/agents/{agent}", saved.get_agent, methods=["GET"]),
        Route("/v1/agents/{agent}", saved.update_agent, methods=["POST"]),
        Route("/v1/agents/{agent}", saved.delete_agent, methods=["DELETE"]),
    ]
