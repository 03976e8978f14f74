"""GET /openapi.json: the routes as they are, with bodies generated from the types that decode them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from agentserve.server.errors import json_response
from agentserve.server.http import housekeeping
from agentserve.server.http.chat import chat_completions
from agentserve.server.http.completions import completions
from agentserve.server.http.context import context_of
from agentserve.server.http.replies import (
    ChatReply,
    CompletionReply,
    ErrorReply,
    ModelList,
    ModelReply,
    TokensReply,
)
from agentserve.server.http.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from agentserve.server.text_port import JsonObject

_REFS = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_ANY: JsonObject = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Operation:
    """What a route does not say of itself."""

    body: type | None = None
    reply: type | None = None
    streams: bool = False  # with `stream` true the reply is an event stream
    kind: str = "application/json"  # of other replies


OPERATIONS: Mapping[object, Operation] = {
    chat_completions: Operation(ChatRequest, ChatReply, streams=True),
    completions: Operation(CompletionRequest, CompletionReply, streams=True),
    housekeeping.models: Operation(reply=ModelList),
    housekeeping.model: Operation(reply=ModelReply),
    housekeeping.tokenize: Operation(TokenizeRequest, TokensReply),
    housekeeping.detokenize: Operation(DetokenizeRequest),
    housekeeping.metrics: Operation(kind="text/plain"),
}


async def openapi(request: Request) -> Response:
    """OpenAPI 3.1."""
    routes: Sequence[BaseRoute] = request.app.routes
    return json_response(document(routes, context_of(request).options.version))


def document(routes: Sequence[BaseRoute], version: str) -> JsonObject:
    """Of all routes but this one. Those that have no `Operation` take and give any JSON."""
    shown = [route for route in routes if isinstance(route, Route) and route.endpoint is not openapi]
    operations = {route: OPERATIONS.get(route.endpoint, Operation()) for route in shown}
    types = [kind for operation in operations.values() for kind in (operation.body, operation.reply) if kind]
    schemas, components = msgspec.json.schema_components([ErrorReply, *types], ref_template=_REFS)
    named = dict(zip([ErrorReply, *types], schemas, strict=True))
    paths: JsonObject = {}
    for route in shown:
        path = _PARAMETER.sub(r"{\1}", route.path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(route, method, operations[route], named)
    return {
        "openapi": "3.1.0",
        "info": {"title": "AgentServe", "version": version},
        "paths": paths,
        "components": {
            "schemas": dict(components),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(
    route: Route, method: str, operation: Operation, named: Mapping[type, JsonObject]
) -> JsonObject:
    content: JsonObject = {operation.kind: {"schema": named.get(operation.reply or object, {})}}
    if operation.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"description": "An error", "content": {"application/json": {"schema": named[ErrorReply]}}}
    said: JsonObject = {
        "operationId": f"{route.name}_{method.lower()}",
        "summary": _summary(route.endpoint),
        "responses": {
            "200": {"description": "The answer", "content": content},
            "4XX": error,
            "5XX": error,
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(route.path)
    ]
    if parameters:
        said["parameters"] = parameters
    if method == "POST" and (operation.body is not None or route.endpoint not in OPERATIONS):
        schema = named.get(operation.body, _ANY) if operation.body else _ANY
        said["requestBody"] = {
            "required": operation.body is not None,
            "content": {"application/json": {"schema": schema}},
        }
    return said


def _summary(endpoint: object) -> str:
    text = (getattr(endpoint, "__doc__", None) or "").strip().partition("\n")[0]
    return text or str(getattr(endpoint, "__name__", "")).replace("_", " ")
