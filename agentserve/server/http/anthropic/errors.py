"""Errors, and frames of a stream, in Anthropic's shape."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Scope

from agentserve.server.errors import ApiError, json_response
from agentserve.server.json_line import dump_json
from agentserve.server.text_port import JsonObject

PATH = "/v1/messages"
MODELS = "/v1/models"
_VERSION = b"anthropic-version"
REQUEST_ID = "request-id"  # the header that Anthropic's SDKs read; the gate sets it

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def is_ours(path: str) -> bool:
    """Whether who calls this path expects Anthropic's shapes."""
    return path == PATH or path.startswith(f"{PATH}/")


def speaks(scope: Scope) -> bool:
    """Whether a request's reply has Anthropic's shapes: by its path or, where that is everybody's, by the
    header that Anthropic's SDKs send."""
    path: str = scope["path"]
    if path == MODELS or path.startswith(f"{MODELS}/"):
        return any(name == _VERSION for name, _ in scope["headers"])
    return is_ours(path)


def error_body(error: ApiError, request_id: str) -> JsonObject:
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    told: JsonObject = {"type": kind, "message": _message(error)}
    if error.details:
        told["details"] = error.details
    return {
        "type": "error",
        "error": told,
        "request_id": request_id,
    }


def _message(error: ApiError) -> str:
    """Clients that compact their history look for this beginning, and for both numbers."""
    if error.code != "context_length_exceeded":
        return error.message
    tokens, limit = error.details.get("prompt_tokens"), error.details.get("max_model_len")
    numbers = f"{tokens} tokens > {limit} maximum. " if tokens is not None else ""
    return f"prompt is too long: {numbers}{error.message}"


def error_response(error: ApiError, request_id: str) -> Response:
    return json_response(error_body(error, request_id), status=error.status, headers=error.reply_headers)


def event_frame(event: JsonObject) -> bytes:
    """One event of a stream; its name is its type."""
    return b"event: " + str(event["type"]).encode("ascii") + b"\ndata: " + dump_json(event) + b"\n\n"
