"""What came of an attempt, and what that means.

2xx is success and nothing else is. A redirect is a failure like others: it is never followed. 410 takes the
endpoint out of use; 429, 502 and 504 say that it has too much to do; the rest is tried again.

The body of a tool call's 2xx is its result: `{"output": …}`, or `{"success": false, "error": "…"}`, as
`application/json`. 202, 204 or no body at all: the receiver has the call, and posts the result later. Any
other body ends the delivery with an error that says so: the receiver would give the same one again. What
receivers write is in no error and no log: who named the address may not be who may read what is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from tools_bridge.webhooks.schedule import THROTTLE, retry_after_seconds
from tools_bridge.webhooks.types import Kind, ToolResult, Why

_GONE = 410
_THROTTLED = (429, 502, 504)
_LATER = (202, 204)
_MOST_ERROR = 4096  # characters of a tool's error


class Fault(StrEnum):
    """Why there was no reply."""

    REFUSED = "address refused"  # by us; no connection was made
    RESOLVE = "name not resolved"
    CONNECT = "no connection"
    TLS = "no secure connection"
    TIMEOUT = "timeout"
    PROTOCOL = "not HTTP, or cut off"
    TOO_LARGE = "too large"
    INTERNAL = "internal error"


@dataclass(frozen=True, slots=True)
class Failed:
    """There was no whole reply. `status`: what it began with."""

    fault: Fault
    detail: str = ""
    status: int | None = None

    def __str__(self) -> str:
        return f"{self.fault}: {self.detail}" if self.detail else str(self.fault)


@dataclass(frozen=True, slots=True)
class Answered:
    """`body`: of a 2xx, where it was asked for."""

    status: int
    retry_after: str | None = None
    content_type: str = ""
    content_encoding: str = ""
    body: bytes = b""


Reply = Failed | Answered


@dataclass(frozen=True, slots=True)
class Taken:
    result: ToolResult | None = None


@dataclass(frozen=True, slots=True)
class Again:
    """`counts`: as a failure of the endpoint. `pause`: seconds in which it is not to be asked anything."""

    error: str
    counts: bool = True
    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class Never:
    """`counts`: as a failure of the endpoint."""

    why: Why
    error: str
    counts: bool = False


@dataclass(frozen=True, slots=True)
class Gone:
    error: str


Verdict = Taken | Again | Never | Gone


def judge(kind: Kind, reply: Reply, now: float) -> Verdict:
    """`now`: Unix time, for a `retry-after` that is a date."""
    if isinstance(reply, Failed):
        return _judge_failure(kind, reply)
    status = reply.status
    if 200 <= status < 300:
        return _read(reply) if kind is Kind.TOOL else Taken()
    if status == _GONE:
        return Gone("410: the receiver wants no more")
    asked = retry_after_seconds(reply.retry_after, now)
    if status in _THROTTLED:
        return Again(f"status {status}", counts=status != 429, pause=THROTTLE if asked is None else asked)
    if 300 <= status < 400:
        return Again(f"status {status}: redirects are not followed", pause=asked or 0.0)
    return Again(f"status {status}", pause=asked or 0.0)


def _judge_failure(kind: Kind, reply: Failed) -> Verdict:
    if reply.fault is Fault.REFUSED and kind is Kind.TOOL:
        return Never(Why.ADDRESS_REFUSED, str(reply))
    if reply.fault is Fault.TOO_LARGE and kind is Kind.TOOL and reply.status is not None:
        return Never(Why.BAD_REPLY, str(reply))
    return Again(str(reply), counts=reply.fault is not Fault.INTERNAL)


class _Result(msgspec.Struct):
    """Other fields are nobody's business."""

    output: object = msgspec.UNSET
    success: bool = True
    error: str | None = None


def _read(reply: Answered) -> Verdict:
    if reply.status in _LATER or not reply.body.strip():
        return Taken()
    if reply.content_encoding.strip().lower() not in ("", "identity"):
        return _bad("it is compressed, which was not asked for")
    media = reply.content_type.partition(";")[0].strip().lower()
    if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
        return _bad("its content type is not application/json")
    try:
        found = msgspec.json.decode(reply.body, type=_Result)
        output = _output(found)
        error = found.error or ""
    except msgspec.ValidationError:
        return _bad("its fields have other types")
    except (msgspec.DecodeError, RecursionError, ValueError):
        return _bad("it is not JSON")
    if found.success and (found.output is msgspec.UNSET or found.error):
        return _bad("it has neither an output nor success: false with an error")
    return Taken(ToolResult(found.success, output, error[:_MOST_ERROR]))


def _output(found: _Result) -> str | list[dict[str, object]]:
    output = found.output
    if output is msgspec.UNSET or output is None:
        return ""
    written = msgspec.json.encode(output)  # also says whether it can be
    if isinstance(output, str):
        return output
    if isinstance(output, list) and output and all(isinstance(part, dict) for part in output):
        return output
    return written.decode()


def _bad(problem: str) -> Never:
    return Never(
        Why.BAD_REPLY, f"the reply is no tool result: {problem} (202, 204 or no body: the result comes later)"
    )
