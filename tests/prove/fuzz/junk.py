"""Values, headers and queries that nobody expects where they stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "x", "GET\x01")
JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 127, 128, 2**31, 2**53 + 1, 2**63, -(2**63), 2**64, 10**30, 0.0, -0.0,
    0.1, 1e308, -1e-320, "", " ", "x", "auto", "none", "required", "tool", "assistant", "\x00", "\n",
    "<|im_start|>system\n", "<|im_end|>", "<tool_call>", "</think>", "..", "../../etc/passwd", "{{7*7}}",
    "{% for x in range(10**9) %}{% endfor %}", "%s%n", "' OR 1=1 --", "\u202e", "\ufeff", "😀" * 50,
    "e\u0301" * 40, "(a+)+$", "^(a|a)*$", "[", "{", "NaN", "1e999", [], {}, [[]], [{}], [None], ["x", 1],
    {"": ""}, {"type": "x"}, {"type": "function"}, {"type": "text", "text": "x"}, {"$ref": "#"},
    {"type": "input_image", "image_url": "file:///etc/passwd"}, {"role": "user", "content": "x"},
    {"__class__": "x"}, {"a": {"b": {"c": [1, {"d": None}]}}}, ["a"] * 300, "x" * 5000, "é" * 3000,
    list(range(500)), {str(i): i for i in range(300)},
]  # fmt: skip
HEADERS: dict[str, Sequence[str]] = {
    "content-type": (
        "text/plain", "application/json; charset=utf-16", "multipart/form-data; boundary=x", "x" * 300, "",
    ),
    "content-encoding": ("gzip", "br", "x"),
    "accept": ("text/event-stream", "*/*", "x" * 300),
    "accept-encoding": ("gzip", "identity;q=0"),
    "authorization": ("Bearer ", "Bearer wrong", "Basic eDp5", "bearer " + "k" * 2000, "\xff"),
    "x-api-key": ("", "wrong", "\xe9"),
    "x-session-id": ("s1", "", "x" * 500, "\x7f", "a/b", "é"),
    "x-request-id": ("", "x" * 900, "\xff"),
    "session-id": ("t1", "\x01"),
    "x-parent-session-id": ("s1", "nobody"),
    "x-session-final": ("true", "1", "maybe"),
    "idempotency-key": ("k1", "k2", "", "x" * 5000, "\xff"),
    "last-event-id": ("0", "-1", "x-9", "9" * 400, "a-" + "9" * 30, "\xff"),
    "anthropic-version": ("2023-06-01", "x"),
    "anthropic-beta": ("message-threads-2025-01-01", "x,y"),
    "openai-beta": ("agents=v1",),
    "origin": ("null", "http://evil.example", "x"),
    "expect": ("100-continue", "200-ok"),
    "connection": ("close", "upgrade", "keep-alive, x"),
    "upgrade": ("websocket", "h2c"),
    "range": ("bytes=0-1",),
    "x-forwarded-for": ("1.2.3.4", "\xff"),
    "cookie": ("a=b; " * 100,),
}  # fmt: skip
QUERIES = (
    "", "stream=true", "after=", "after=-1", "after=now", "after=99999999999999999999", "limit=0", "limit=-1",
    "limit=1e9", "limit=100", "order=asc", "order=x", "starting_after=-5", "starting_after=x", "epoch=-1",
    "epoch=9e9", "max_tokens=0", "detail=true", "%00=%ff", "=&&=;", "a=" + "b" * 4000, "include[]=x",
    "stream=true&starting_after=0", "after=%F0%9F%98%80", "verbose=1&reset=true",
)  # fmt: skip
