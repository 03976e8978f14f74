"""Bodies of the webhook routes. Unknown fields are ignored."""

from __future__ import annotations

from typing import Literal

import msgspec

Form = Literal["thin", "full"]


class EndpointRequest(msgspec.Struct):
    """`payload` is ours: what a tool's call says of it; `thin`, as OpenAI's: the session's id alone."""

    name: str
    url: str
    event_types: list[str]
    payload: Form = "thin"


class EndpointUpdate(msgspec.Struct):
    name: str | None = None
    url: str | None = None
    event_types: list[str] | None = None
    payload: Form | None = None


class RotateRequest(msgspec.Struct):
    keep_old_secret_active_for_24_hours: bool | None = None


class TestRequest(msgspec.Struct):
    event_type: str


class CallbackRequest(msgspec.Struct):
    """A tool's result: `output` (text, parts, or any JSON), or `success` false and an `error`."""

    output: object = None
    success: bool = True
    error: str | None = None
