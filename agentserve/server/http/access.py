"""Who may call what: one table over all routes. What is not in it is refused.

A route is declared by its path, as it stands in the route table, whatever its methods. The gate has said
whom a request comes from before it is routed; here it is asked whether that is enough, and whether the
tenant may begin a turn now.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from starlette.routing import BaseRoute, Route, compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from agentserve.server.errors import ApiError
from agentserve.server.http.callers import caller_in, no_key, not_a_tenant, not_an_admin
from agentserve.server.http.pace import let_body_take_its_time
from agentserve.server.http.reading import bound_body
from agentserve.server.tenants.accounts import Accounts
from agentserve.server.tenants.keys import Caller
from agentserve.server.webhooks.hooks import CALLBACKS


class Access(Enum):
    OPEN = "open"  # without a key
    TENANT = "tenant"  # with a tenant's key: what it sees and changes is that tenant's
    ADMIN = "admin"  # with an admin's key: the server as a whole


@dataclass(frozen=True, slots=True)
class Rule:
    access: Access
    turns: bool = False  # its POST computes: refused before its body is read where a tenant's limits say so
    keyed: bool = False  # not even an open server's, whose first key would shut out all others
    slow_body: bool = False  # its body comes as slowly as what makes it


_OPEN, _TENANT, _ADMIN = Rule(Access.OPEN), Rule(Access.TENANT), Rule(Access.ADMIN)
_TURNS = Rule(Access.TENANT, turns=True)
_KEYED = Rule(Access.ADMIN, keyed=True)

_SESSION = "/agentserve/sessions/{name}"
_AGENT_SESSION = "/v1/agents/sessions/{id}"
_ENDPOINTS = "/v1/webhook_endpoints"
_ADMIN_ROUTES = "/agentserve/admin"
_ENDPOINT = f"{_ENDPOINTS}/{{id}}"
RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "/health": _OPEN,
        "/ready": _OPEN,
        "/ping": _OPEN,
        "/version": _OPEN,
        "/v1/chat/completions": _TURNS,
        "/v1/completions": _TURNS,
        "/v1/messages": _TURNS,
        "/v1/messages/count_tokens": _TENANT,
        "/v1/models": _TENANT,
        "/v1/models/{name:path}": _TENANT,
        "/openapi.json": _TENANT,
        "/tokenize": _TENANT,
        "/detokenize": _TENANT,
        "/close_session": _TENANT,
        "/agentserve/sessions": _TENANT,
        _SESSION: _TENANT,
        f"{_SESSION}/tool_results": _TURNS,
        f"{_SESSION}/tool_results/{{call_id}}/stream": Rule(Access.TENANT, turns=True, slow_body=True),
        f"{_SESSION}/fork": _TENANT,
        f"{_SESSION}/hints": _TENANT,
        f"{_SESSION}/events": _TENANT,
        "/v1/responses": _TURNS,
        "/v1/responses/input_tokens": _TENANT,
        "/v1/responses/compact": _TENANT,
        "/v1/responses/{id}": _TENANT,
        "/v1/responses/{id}/cancel": _TENANT,
        "/v1/responses/{id}/input_items": _TENANT,
        "/v1/conversations": _TENANT,
        "/v1/conversations/{id}": _TENANT,
        "/v1/conversations/{id}/items": _TENANT,
        "/v1/conversations/{id}/items/{item}": _TENANT,
        "/v1/agents": _TENANT,
        "/v1/agents/{agent}": _TENANT,
        "/v1/agents/sessions": _TURNS,
        _AGENT_SESSION: _TENANT,
        f"{_AGENT_SESSION}/events": _TURNS,
        f"{_AGENT_SESSION}/items": _TENANT,
        f"{_AGENT_SESSION}/turns": _TENANT,
        f"{_AGENT_SESSION}/turns/{{turn}}": _TENANT,
        f"{_AGENT_SESSION}/turns/{{turn}}/items": _TENANT,
        _ENDPOINTS: _TENANT,
        _ENDPOINT: _TENANT,
        f"{_ENDPOINT}/rotate_secret": _TENANT,
        f"{_ENDPOINT}/test": _TENANT,
        f"{_ENDPOINT}/disable": _TENANT,
        f"{_ENDPOINT}/enable": _TENANT,
        f"{_ENDPOINT}/deliveries": _TENANT,
        f"{_ENDPOINT}/deliveries/{{event}}": _TENANT,
        f"{_ENDPOINT}/deliveries/{{event}}/replay": _TENANT,
        "/v1/webhook_event_types": _TENANT,
        f"{CALLBACKS}{{token}}": _OPEN,  # the token is the key
        "/server_info": _ADMIN,
        "/metrics": _ADMIN,
        "/load": _ADMIN,
        "/reset_prefix_cache": _ADMIN,
        "/flush_cache": _ADMIN,
        f"{_ADMIN_ROUTES}/keys": _KEYED,
        f"{_ADMIN_ROUTES}/keys/{{id}}": _KEYED,
        f"{_ADMIN_ROUTES}/keys/{{id}}/rotate": _KEYED,
        f"{_ADMIN_ROUTES}/tenants": _KEYED,
        f"{_ADMIN_ROUTES}/tenants/{{tenant}}": _KEYED,
        f"{_ADMIN_ROUTES}/tenants/{{tenant}}/keys": _KEYED,
    }
)


def paths(*kinds: Access, rules: Mapping[str, Rule] = RULES) -> frozenset[str]:
    """Those of these kinds that have no parameters."""
    return frozenset(path for path, rule in rules.items() if rule.access in kinds and "{" not in path)


def turn_routes(rules: Mapping[str, Rule] = RULES) -> frozenset[str]:
    """Those whose POST asks for a turn."""
    return frozenset(path for path, rule in rules.items() if rule.turns)


class TurnPaths:
    """For requests that were answered before they were routed: whether they asked for a turn."""

    def __init__(self, rules: Mapping[str, Rule] = RULES) -> None:
        self._patterns = [(compile_path(path)[0], path) for path in turn_routes(rules)]

    def route(self, path: str) -> str | None:
        return next((route for pattern, route in self._patterns if pattern.match(path)), None)


def undeclared(routes: Iterable[BaseRoute], rules: Mapping[str, Rule] = RULES) -> list[str]:
    """What could never be called."""
    return [
        getattr(route, "path", repr(route)) for route in routes if getattr(route, "path", None) not in rules
    ]


def guard(routes: Iterable[BaseRoute], accounts: Accounts, rules: Mapping[str, Rule] = RULES) -> None:
    """Put the table before every route. A route of another kind than `Route` is refused altogether."""
    for route in routes:
        if not isinstance(route, Route):
            raise TypeError(f"{route!r}: only plain routes can be guarded")
        route.app = _Guarded(route.app, route.path, rules.get(route.path), accounts)


class _Guarded:
    def __init__(self, app: ASGIApp, path: str, rule: Rule | None, accounts: Accounts) -> None:
        self._app = app
        self._path = path
        self._rule = rule
        self._accounts = accounts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["route"] = self._path  # for the audit log
        rule, caller = self._rule, caller_in(scope)
        check(rule, caller)
        if rule is not None and rule.slow_body:
            let_body_take_its_time(scope)
        if rule is not None and caller is not None and caller.tenant is not None:
            limits = self._accounts.limits(caller.tenant)
            if limits.request_bytes is not None:
                bound_body(scope, limits.request_bytes)
            if rule.turns and scope["method"] == "POST":
                self._accounts.check_turn(caller.tenant)
        await self._app(scope, receive, send)


def check(rule: Rule | None, caller: Caller | None) -> None:
    """ApiError where the caller may not."""
    if rule is None:
        raise ApiError("Nobody has said who may call this.", status=403, code="access_not_declared")
    if rule.access is Access.OPEN:
        return
    if caller is None:
        raise no_key()
    if (rule.access is Access.ADMIN and not caller.admin) or (rule.keyed and caller.key is None):
        raise not_an_admin()
    if rule.access is Access.TENANT and caller.tenant is None:
        raise not_a_tenant()
