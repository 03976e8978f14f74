"""Bounds on what a client may ask, checked before any work is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from agentserve.server.errors import ApiError

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True)
class Limits:
    body_bytes: int = 16 << 20
    json_depth: int = 100
    choices: int = 128
    prompts: int = 128  # of one /v1/completions request
    total_choices: int = 256  # prompts x n
    top_logprobs: int = 20
    stops: int = 16
    stop_chars: int = 256
    stop_token_ids: int = 256
    logit_bias: int = 1024
    tools: int = 256
    messages: int = 10_000
    session_id_chars: int = 128
    cache_salt_chars: int = 256
    request_id_chars: int = 128
    schema_bytes: int = 256 << 10
    priority: int = 1_000_000


def check_depth(body: bytes, limit: int) -> None:
    """Refuse JSON nested deeper than `limit`, without recursion and in C speed.

    Text in strings may hold brackets, so strings are emptied first; then each pass removes the
    innermost pairs, and as many passes as levels empty a well-formed body.
    """
    brackets = _brackets_outside_strings(body)
    for _ in range(limit):
        if not brackets:
            return
        shorter = brackets.replace(b"[]", b"")
        if len(shorter) == len(brackets):
            break
        brackets = shorter
    if brackets.count(b"[") > limit or (brackets and b"[]" in brackets):
        raise ApiError(f"The request body is nested deeper than {limit} levels.", code="json_too_deep")


_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_AS_SQUARE = bytes.maketrans(b"{}", b"[]")


def _brackets_outside_strings(body: bytes) -> bytes:
    # A quote is escaped when an odd number of backslashes precedes it: dropping the escaped
    # backslashes and then the escaped quotes leaves only quotes that open or close a string.
    parts = body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    outside = b"".join(parts[::2])
    return outside.translate(_AS_SQUARE, _NOT_BRACKETS)
