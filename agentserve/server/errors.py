"""Errors as OpenAI clients expect them: one JSON shape, on every path."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response

from agentserve.server.json_line import dump_whole

MESSAGE_CHARS = 300  # messages quote what clients sent, which may be megabytes


class ApiError(Exception):
    """A request that gets an error instead of an answer.

    `message` is one line for the client; it and `param` are clipped to MESSAGE_CHARS. `details` stand
    beside them: what a program needs to do better.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, object] | None = None,
    ) -> None:
        self.details = dict(details or {})
        self.message = _clipped(message)
        super().__init__(self.message)
        self.status = status
        self.param = None if param is None else _clipped(param)
        self.code = code
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        if self.status == 404:
            return "not_found_error"
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> dict[str, object]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
                **self.details,
            },
        }

    @property
    def reply_headers(self) -> dict[str, str]:
        headers = dict(self.headers)
        if self.status < 500:
            # The official SDKs retry some 4xx by themselves; a bad request stays bad.
            headers.setdefault("x-should-retry", "false")
        return headers

    def response(self) -> Response:
        return json_response(self.body(), status=self.status, headers=self.reply_headers)


def _clipped(text: str) -> str:
    return text if len(text) <= MESSAGE_CHARS else text[: MESSAGE_CHARS - 3] + "..."


def json_response(value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(
        dump_whole(value), status_code=status, headers=dict(headers or {}), media_type="application/json"
    )


def shutting_down() -> ApiError:
    """The server leaves before the answer was ready."""
    return ApiError(
        "The server is shutting down; the answer was not finished.",
        status=503,
        code="server_shutting_down",
        headers={"retry-after": "1"},
    )


def context_too_long(prompt: int, limit: int, param: str) -> ApiError:
    return ApiError(
        f"This model's maximum context length is {limit} tokens, "
        f"but the prompt has {prompt} tokens and leaves no room for an answer.",
        param=param,
        code="context_length_exceeded",
        details={"prompt_tokens": prompt, "max_model_len": limit},
    )


def text_too_long(size: int, most: int, param: str) -> ApiError:
    """For a text of which the bytes alone say that its tokens cannot fit."""
    return ApiError(
        f"This model's maximum context length is exceeded: the text has {size} bytes, "
        f"and the context holds at most {most}.",
        param=param,
        code="context_length_exceeded",
    )
