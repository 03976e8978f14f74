"""The key that a request brings: one, in a header, by the names of both vendors."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import parse_qsl

from starlette.datastructures import Headers

from agentserve.server.errors import ApiError
from agentserve.server.http.callers import ASKS
from agentserve.tenant_names import has_key

_IN_QUERIES = frozenset(
    {"access_token", "api-key", "api_key", "apikey", "auth", "authorization", "key", "token", "x-api-key"}
)


def given_key(headers: Headers) -> str:
    """Empty: it brings none. ApiError where it brings several that differ: whose it is nobody can say, and a
    proxy before this server may have looked at another of them."""
    found = set(_bearers(headers.getlist("authorization")))
    found.update(key for key in headers.getlist("x-api-key") if key)
    if len(found) > 1:
        raise ApiError("The request brings several keys.", status=401, code="several_keys", headers=ASKS)
    return found.pop() if found else ""


def refuse_keys_in(path: str, query: bytes) -> None:
    """URLs are written down by proxies, browsers and shells: a key in one is as good as published. ApiError,
    which does not repeat it."""
    if not query and not has_key(path):
        return
    given = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    if has_key(path) or any(
        name.lower() in _IN_QUERIES or has_key(f"{name} {value}") for name, value in given
    ):
        raise ApiError(
            "A key belongs into a header (Authorization: Bearer, or x-api-key), never into a URL. If this one"
            " is real, replace it.",
            code="key_in_url",
        )


def _bearers(values: Iterable[str]) -> Iterable[str]:
    for value in values:
        scheme, _, given = value.partition(" ")
        if scheme.lower() == "bearer" and given.strip():
            yield given.strip()
