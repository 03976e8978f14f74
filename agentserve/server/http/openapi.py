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
from agentserve.server.http.access import RULES, Access, Rule
from agentserve.server.http.admin import keys as admin_keys
from agentserve.server.http.admin import tenants as admin_tenants
from agentserve.server.http.admin.schemas import (
    KeyList,
    KeyReply,
    KeyRequest,
    LimitsRequest,
    RotateKeyRequest,
    TenantList,
    TenantReply,
)
from agentserve.server.http.agents import inputs, lists, saved, sessions, stream
from agentserve.server.http.agents.openapi_replies import AgentReply, SessionReply, TurnReply
from agentserve.server.http.agents.schemas import AgentRequest, EventsRequest, SessionRequest, SessionUpdate
from agentserve.server.http.anthropic.messages import count_tokens, messages
from agentserve.server.http.anthropic.schemas import CountRequest, MessagesRequest
from agentserve.server.http.chat import chat_completions
from agentserve.server.http.completions import completions
from agentserve.server.http.context import context_of
from agentserve.server.http.openapi_replies import (
    ChatReply,
    CompletionReply,
    ConversationReply,
    DeletedReply,
    ErrorReply,
    InputTokensReply,
    ItemList,
    MessageReply,
    MessagesErrorReply,
    MessageTokens,
    ModelList,
    ModelReply,
    ResponseReply,
    TokensReply,
)
from agentserve.server.http.responses import conversation_routes as conversations
from agentserve.server.http.responses import retrieve
from agentserve.server.http.responses.create import compact, count_input, create_response
from agentserve.server.http.responses.schemas import ConversationRequest, ItemsRequest, ResponsesRequest
from agentserve.server.http.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from agentserve.server.http.webhooks import endpoints as hooks
from agentserve.server.http.webhooks.callbacks import tool_callback
from agentserve.server.http.webhooks.openapi_replies import (
    WebhookDeliveryList,
    WebhookDeliveryReply,
    WebhookEndpointList,
    WebhookEndpointReply,
    WebhookEventTypes,
    WebhookSecretReply,
    WebhookTestReply,
)
from agentserve.server.http.webhooks.schemas import (
    CallbackRequest,
    EndpointRequest,
    EndpointUpdate,
    RotateRequest,
    TestRequest,
)
from agentserve.server.text_port import JsonObject

_REFS = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
ACCEPTED, NOT_FOUND = 202, 404
_ANY: JsonObject = {"type": "object"}
_ASKED: JsonObject = {"www-authenticate": {"description": "How keys are sent", "schema": {"type": "string"}}}
_RETRY: JsonObject = {
    "retry-after": {
        "description": "Seconds until it may be let in",
        "schema": {"type": "integer", "minimum": 1},
    },
    "x-should-retry": {"description": "For SDKs that look", "schema": {"type": "string"}},
}


@dataclass(frozen=True, slots=True)
class Operation:
    """What a route does not say of itself."""

    body: type | None = None
    reply: type | None = None
    streams: bool = False  # with `stream` true the reply is an event stream
    kind: str = "application/json"  # of other replies
    status: int = 200  # of replies; 202 and 404 have no body
    query: tuple[tuple[str, str], ...] = ()  # parameters of the query, and their types
    error: type = ErrorReply


OPERATIONS: Mapping[object, Operation] = {
    chat_completions: Operation(ChatRequest, ChatReply, streams=True),
    completions: Operation(CompletionRequest, CompletionReply, streams=True),
    messages: Operation(MessagesRequest, MessageReply, streams=True, error=MessagesErrorReply),
    count_tokens: Operation(CountRequest, MessageTokens, error=MessagesErrorReply),
    create_response: Operation(ResponsesRequest, ResponseReply, streams=True),
    count_input: Operation(ResponsesRequest, InputTokensReply),
    compact: Operation(status=NOT_FOUND),
    retrieve.get_response: Operation(
        reply=ResponseReply, streams=True, query=(("stream", "boolean"), ("starting_after", "integer"))
    ),
    retrieve.cancel_response: Operation(reply=ResponseReply),
    retrieve.delete_response: Operation(reply=DeletedReply),
    retrieve.input_items: Operation(reply=ItemList),
    conversations.create_conversation: Operation(ConversationRequest, ConversationReply),
    conversations.get_conversation: Operation(reply=ConversationReply),
    conversations.update_conversation: Operation(ConversationRequest, ConversationReply),
    conversations.delete_conversation: Operation(reply=DeletedReply),
    conversations.list_items: Operation(reply=ItemList),
    conversations.add_items: Operation(ItemsRequest, ItemList),
    conversations.delete_item: Operation(reply=ConversationReply),
    sessions.create_session: Operation(SessionRequest, SessionReply, streams=True),
    sessions.update_session: Operation(SessionUpdate, SessionReply),
    sessions.get_session: Operation(reply=SessionReply),
    sessions.list_sessions: Operation(reply=ItemList),
    sessions.delete_session: Operation(reply=DeletedReply),
    inputs.send_events: Operation(EventsRequest, status=ACCEPTED),
    stream.follow_events: Operation(kind="text/event-stream"),
    lists.list_items: Operation(reply=ItemList),
    hooks.create_endpoint: Operation(EndpointRequest, WebhookSecretReply),
    hooks.list_endpoints: Operation(reply=WebhookEndpointList),
    hooks.get_endpoint: Operation(reply=WebhookEndpointReply),
    hooks.update_endpoint: Operation(EndpointUpdate, WebhookEndpointReply),
    hooks.delete_endpoint: Operation(reply=DeletedReply),
    hooks.rotate_secret: Operation(RotateRequest, WebhookSecretReply),
    hooks.try_endpoint: Operation(TestRequest, WebhookTestReply),
    hooks.disable_endpoint: Operation(reply=WebhookEndpointReply),
    hooks.enable_endpoint: Operation(reply=WebhookEndpointReply),
    hooks.list_deliveries: Operation(reply=WebhookDeliveryList),
    hooks.get_delivery: Operation(reply=WebhookDeliveryReply),
    hooks.replay_delivery: Operation(reply=WebhookDeliveryReply),
    hooks.event_types: Operation(reply=WebhookEventTypes),
    tool_callback: Operation(CallbackRequest, status=ACCEPTED),
    lists.list_turns: Operation(reply=ItemList),
    lists.get_turn: Operation(reply=TurnReply),
    lists.list_turn_items: Operation(reply=ItemList),
    saved.create_agent: Operation(AgentRequest, AgentReply),
    saved.update_agent: Operation(AgentRequest, AgentReply),
    saved.get_agent: Operation(reply=AgentReply),
    saved.list_agents: Operation(reply=ItemList),
    saved.delete_agent: Operation(reply=DeletedReply),
    admin_keys.list_keys: Operation(reply=KeyList, query=(("tenant", "string"),)),
    admin_keys.create_key: Operation(KeyRequest, KeyReply),
    admin_keys.revoke_key: Operation(reply=KeyReply),
    admin_keys.rotate_key: Operation(RotateKeyRequest, KeyReply),
    admin_keys.revoke_keys_of: Operation(reply=KeyList),
    admin_tenants.list_tenants: Operation(reply=TenantList),
    admin_tenants.get_tenant: Operation(reply=TenantReply),
    admin_tenants.set_limits: Operation(LimitsRequest, TenantReply),
    housekeeping.models: Operation(reply=ModelList),
    housekeeping.model: Operation(reply=ModelReply),
    housekeeping.tokenize: Operation(TokenizeRequest, TokensReply),
    housekeeping.detokenize: Operation(DetokenizeRequest),
    housekeeping.metrics: Operation(kind="text/plain"),
}


async def openapi(request: Request) -> Response:
    """OpenAPI 3.1."""
    state = request.app.state
    if not hasattr(state, "openapi"):  # it is made once: that takes long enough to be noticed by streams
        context = context_of(request)
        options = context.options
        models = [options.model, *options.aliases]
        made = await context.off_loop(document, request.app.routes, options.version, models)
        state.openapi = json_response(made)
    shown: Response = state.openapi
    return Response(shown.body, media_type=shown.media_type)


def document(routes: Sequence[BaseRoute], version: str, models: Sequence[str]) -> JsonObject:
    """Of all routes but this one, for a server of these models. Routes that have no `Operation` take and
    give any JSON."""
    shown = [route for route in routes if isinstance(route, Route) and route.endpoint is not openapi]
    described = [(route, OPERATIONS.get(route.endpoint, Operation())) for route in shown]
    kinds = (
        kind for _, operation in described for kind in (operation.error, operation.body, operation.reply)
    )
    types = list(dict.fromkeys(kind for kind in kinds if kind is not None))
    schemas, components = msgspec.json.schema_components(types, schema_hook=_anything, ref_template=_REFS)
    named = dict(zip(types, schemas, strict=True))
    for operation in OPERATIONS.values():
        if operation.body is not None:
            _name_models(components.get(operation.body.__name__, {}), models)
    paths: JsonObject = {}
    for route, operation in described:
        path = _PARAMETER.sub(r"{\1}", route.path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(route, method, operation, named)
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


def _name_models(schema: JsonObject, models: Sequence[str]) -> None:
    """What only the running server knows."""
    if "model" in schema.get("properties", {}):
        schema["properties"]["model"] = {"enum": list(models)}


def _anything(kind: type) -> JsonObject:
    """Of fields whose value is looked at elsewhere, or by nobody."""
    if kind is object:
        return {"description": "Any value."}
    raise NotImplementedError


def _operation(
    route: Route, method: str, operation: Operation, named: Mapping[type, JsonObject]
) -> JsonObject:
    content: JsonObject = {operation.kind: {"schema": named.get(operation.reply or object, {})}}
    if operation.streams:
        content["text/event-stream"] = {}  # a schema would be of each event, and their kinds are many
    shape = named[operation.error]
    error = {"description": "An error", "content": {"application/json": {"schema": shape}}}
    rule = RULES.get(route.path)
    answers: JsonObject = {"4XX": error, "5XX": error, **_refusals(rule, error)}
    if operation.status == ACCEPTED:
        answers["202"] = {"description": "Accepted"}
    elif operation.status != NOT_FOUND:
        answers[str(operation.status)] = {"description": "The answer", "content": content}
    said: JsonObject = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{_PARAMETER.sub('by', route.path)}"),
        "summary": _summary(route.endpoint),
        "responses": answers,
        "security": [] if rule is None or rule.access is Access.OPEN else [{"bearer": []}, {"key": []}],
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(route.path)
    ]
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": {"type": kind}}
        for name, kind in operation.query
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


def _refusals(rule: Rule | None, error: JsonObject) -> JsonObject:
    """What who may not is told, in the shape of the API that was called."""
    if rule is None or rule.access is Access.OPEN:
        return {}
    told = {
        "401": error | {"description": "No key, one that nobody has, or several", "headers": _ASKED},
        "403": error | {"description": "The key is not of the kind that may"},
    }
    if rule.access is Access.TENANT:
        told["429"] = error | {"description": "Over a limit of the tenant", "headers": _RETRY}
    return told


def _summary(endpoint: object) -> str:
    """The first sentence of what is said of it, else its name."""
    text = " ".join((getattr(endpoint, "__doc__", None) or "").split())
    sentence = re.split(r"(?<=[.!])\s", text, maxsplit=1)[0]
    return sentence or str(getattr(endpoint, "__name__", "")).replace("_", " ").capitalize() + "."
