"""Whose request it is, and what its path names."""

from __future__ import annotations

from starlette.requests import Request

from agentserve.server.agents.history import History
from agentserve.server.agents.records import SavedAgent, Turn
from agentserve.server.errors import ApiError
from agentserve.server.http.context import ServerContext
from agentserve.server.sessions.identity import DEFAULT_TENANT


def whose(request: Request) -> str:
    """The request's tenant."""
    return DEFAULT_TENANT


def session_of(context: ServerContext, request: Request) -> History:
    """Look again after every `await`: sessions are deleted at any time."""
    name = request.path_params["id"]
    history = context.agents.shelf.get(whose(request), name)
    if history is None:
        raise ApiError(f"No session {name[:128]!r}.", status=404, code="session_not_found")
    return history


def turn_of(context: ServerContext, request: Request) -> tuple[History, Turn]:
    history = session_of(context, request)
    name = request.path_params["turn"]
    turn = history.turn(name)
    if turn is None:
        raise ApiError(f"No turn {name[:128]!r} in this session.", status=404, code="turn_not_found")
    return history, turn


def agent_of(context: ServerContext, id_: str, *, param: str | None = None) -> SavedAgent:
    agent = context.agents.shelf.agents.get(id_)
    if agent is None:
        raise ApiError(f"No agent {id_[:128]!r}.", status=404, param=param, code="agent_not_found")
    return agent
