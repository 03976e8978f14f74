"""The response object as clients see it: every key there, also where it says nothing. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from agentserve.messages import TurnUsage
from agentserve.server.errors import ApiError
from agentserve.server.http.responses.schemas import ResponsesRequest
from agentserve.server.http.responses.tools import Toolbox
from agentserve.server.text_port import JsonObject


def response_object(
    body: ResponsesRequest, box: Toolbox, *, id_: str, model: str, created: int, conversation: str | None
) -> JsonObject:
    """Of a response that has just begun."""
    reasoning, text = body.reasoning, body.text
    shown: JsonObject = {
        "id": id_,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "status": "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": body.model or model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "conversation": None if conversation is None else {"id": conversation},
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.stored,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {
            "format": _format(body),
            "verbosity": (text.verbosity if text else None) or "medium",
        },
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": list(box.shown),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "presence_penalty": body.presence_penalty or 0.0,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }
    options = body.prompt_cache_options
    if options is not None:
        shown["prompt_cache_options"] = {
            "mode": options.mode or "implicit",
            "ttl": options.ttl or "30m",
            "comparison_response_id": options.comparison_response_id,
        }
    return shown


def _format(body: ResponsesRequest) -> JsonObject:
    wanted = body.text.format if body.text else None
    if wanted is None or wanted.type != "json_schema":
        return {"type": wanted.type if wanted else "text"}
    return {
        "type": "json_schema",
        "name": wanted.name or "response",
        "description": wanted.description,
        "schema": wanted.schema,
        "strict": bool(wanted.strict),
    }


def usage(turns: Sequence[TurnUsage], *, generated: int | None = None, reasoning: int = 0) -> JsonObject:
    """Of the model calls of a response. `generated`: instead of what they say."""
    prompt, cached = sum(turn.prompt for turn in turns), sum(turn.cached for turn in turns)
    if generated is None:
        generated = sum(turn.generated for turn in turns)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": cached,
            "cache_write_tokens": max(prompt - cached, 0),
        },
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": prompt + generated,
    }


_CODES = {"context_length_exceeded", "insufficient_quota", "rate_limit_exceeded"}
"""What agents look for in a failed response, beside what this API calls its other failures."""


def error_object(error: ApiError) -> JsonObject:
    """Why a response failed."""
    message = error.message
    code = error.code
    if code not in _CODES:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        seconds = error.headers.get("retry-after")
        if seconds is not None:  # agents read from the text when to come again
            code, message = "rate_limit_exceeded", f"{message} Please try again in {seconds}s."
    return {"code": code, "message": message}
