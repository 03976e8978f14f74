"""Bounds on what a client may ask, checked before any work is allocated."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from agentserve.server.errors import ApiError, text_too_long

_MOST_BLANK = 64 << 10
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True)
class Limits:
    body_bytes: int = 4 << 20  # a decoded body takes some thirty times that, for a moment
    body_seconds: float = 60.0  # in which a body must be whole
    prompt_bytes: int = 1 << 62  # of one prompt; the application sets it by its model
    json_depth: int = 100
    json_containers: int = 100_000  # lists and objects; making a million holds everybody up for a second
    json_strings: int = 200_000  # names of fields among them; the same is true of them
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
    expanded_bytes: int = 16 << 20  # to which the items that a request names, and its packed ones, may come
    history_bytes: int = 64 << 20  # of the responses that one goes on from, as they are kept
    schema_bytes: int = 256 << 10
    template_kwargs_bytes: int = 64 << 10  # every session keeps them
    priority: int = 1_000_000
    storage_seconds: float = 30.0  # that a client waits for the disk that keeps its session


def check_text(texts: Iterable[str], limits: Limits, param: str) -> None:
    """Refuse a prompt that cannot fit the context before time is spent on encoding it.

    White space at the edges does not count, unless there is a lot of it: templates may trim it.
    """
    size = blank = 0
    for text in texts:
        stripped = text.strip()
        size += utf8_bytes(stripped)
        blank += len(text) - len(stripped)
    size += max(0, blank - _MOST_BLANK)
    if size > limits.prompt_bytes:
        raise text_too_long(size, limits.prompt_bytes, param)


def check_size(value: object, most: int, param: str) -> None:
    """Refuse what has more than `most` bytes as JSON."""
    if value is not None and (size := len(msgspec.json.encode(value))) > most:
        raise ApiError(f"{param}: it has {size} bytes, at most {most} are allowed", param=param)


def utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def check_depth(body: bytes, limit: int, containers: int = sys.maxsize, strings: int = sys.maxsize) -> None:
    """Refuse JSON nested deeper than `limit`, with more lists and objects than `containers` or more
    `strings`, without recursion, in one pass and in C speed.

    A hostile body is refused before a decoder sees it; for a malformed one any answer will do that
    is right up to where it stops being JSON.
    """
    # A quote is escaped when an odd number of backslashes precedes it: dropping the escaped
    # backslashes and then the escaped quotes leaves only quotes that open or close a string.
    marks = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(_STEPS, _NO_MARKS)
    if marks.count(0) > 2 * strings:
        raise ApiError(f"The request body has more than {strings} strings.", code="json_too_large")
    depth, inside, opened = 0, 0, 0
    for start in range(0, len(marks), _BLOCK):
        steps = np.frombuffer(marks, np.int8, min(_BLOCK, len(marks) - start), start)
        quotes = np.cumsum(steps == 0, dtype=np.uint8) + np.uint8(inside)  # wraps: only odd or even counts
        steps = np.where(quotes & 1, np.int8(0), steps)
        depths = np.cumsum(steps, dtype=np.int32)
        if depth + int(depths.max()) > limit:
            raise ApiError(f"The request body is nested deeper than {limit} levels.", code="json_too_deep")
        opened += int(np.count_nonzero(steps > 0))
        if opened > containers:
            raise ApiError(
                f"The request body has more than {containers} lists and objects.", code="json_too_large"
            )
        depth, inside = depth + int(depths[-1]), int(quotes[-1]) & 1


_BLOCK = 1 << 18  # bytes: the arrays made of one block stay in cache
_STEPS = bytes.maketrans(b'[{]}"', b"\x01\x01\xff\xff\x00")
_NO_MARKS = bytes(set(range(256)) - set(b'[]{}"'))
