"""Names that requests bring in headers and bodies: session ids, request ids.

Agents name their sessions in headers of their own; one table says which, and the first match wins.
A session name is a *lineage* to the directory, so sub-agents that share one disturb nobody.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import Request

from agentserve.server.errors import ApiError
from agentserve.server.limits import Limits
from agentserve.server.sessions.identity import is_name
from agentserve.tenant_names import has_key

log = logging.getLogger(__name__)

SESSION_HEADER = "x-session-id"
REQUEST_HEADER = "x-request-id"
TURN_HEADER = "x-turn-id"  # of an agent's turn, in the reply to the message that began it
FINAL_HEADERS = ("x-session-final", "x-dynamo-session-final")


@dataclass(frozen=True, slots=True)
class _Source:
    """Where one kind of client names its session, and the one that session was started by."""

    session: str
    parent: str | None = None
    within: str | None = None  # names the one that it was started in, where no parent is named


_SOURCES = (
    _Source(SESSION_HEADER, "x-parent-session-id"),  # vLLM, SGLang, OpenCode
    _Source("x-claude-code-agent-id", "x-claude-code-parent-agent-id", "x-claude-code-session-id"),
    _Source("x-claude-code-session-id"),
    _Source("thread-id", "x-codex-parent-thread-id"),  # Codex
    _Source("session-id", "x-codex-parent-thread-id"),  # Codex, older
    _Source("x-dynamo-session-id", "x-dynamo-parent-session-id"),
    _Source("x-deepseek-harness-session-id", "x-deepseek-harness-parent-session-id"),
)


@dataclass(frozen=True, slots=True)
class Identity:
    """What a request says of its session."""

    named: str | None = None
    parent: str | None = None  # the session that started it, as an agent starts a sub-agent
    final: bool = False  # no turn comes after this one


NOBODY = Identity()


def identity(headers: Headers, in_body: str | None, limits: Limits, extra: object = None) -> Identity:
    """The session a client names: in the body's `session_id`, in X-Session-ID, in `extra` (vLLM's
    `vllm_xargs`), in headers of known agents, in that order.

    Names that AgentServe's users give are checked (400); what an agent sends by itself and is no clean
    name is as if it had not been sent.

    A parent header speaks of the session that its own kind of client names beside it: where that is this
    session, or no session is named so, its parent is this one's; where that is another session, it says
    nothing of this one.
    """
    final = any(headers.get(name, "").strip().lower() in ("true", "1") for name in FINAL_HEADERS)
    named = _given(headers, in_body, limits) or _clean(
        extra.get("session_id") if isinstance(extra, Mapping) else None, limits
    )
    theirs = [(source, _clean(headers.get(source.session), limits)) for source in _SOURCES]
    if named is None:
        named = next((name for _, name in theirs if name is not None), None)
    if named is None:
        return Identity(None, None, final)
    parent = _parent(headers, theirs, named, limits)
    return Identity(named, parent if parent != named else None, final)


def _parent(
    headers: Headers, theirs: Sequence[tuple[_Source, str | None]], named: str, limits: Limits
) -> str | None:
    others = {source.parent for source, name in theirs if name not in (None, named)}
    ours = [source for source, name in theirs if name == named]
    unnamed = [source for source, name in theirs if name is None and source.parent not in others]
    headers_of = [header for source in ours for header in (source.parent, source.within)]
    headers_of += [source.parent for source in unnamed]
    parents = (_clean(headers.get(header), limits) for header in headers_of if header is not None)
    return next((parent for parent in parents if parent is not None), None)


def request_id(given: str | None, limits: Limits) -> str:
    """The client's request id where it is clean, else a fresh one. It labels, and identifies nothing."""
    if given is not None and is_name(given, limits.request_id_chars) and not has_key(given):
        return given
    return f"req-{secrets.token_hex(12)}"


def set_request_id(request: Request, in_body: str | None, limits: Limits) -> None:
    """Let the body's request id name this request in the reply's header."""
    if in_body is not None:
        request.state.request_id = request_id(in_body, limits)


def _given(headers: Headers, in_body: str | None, limits: Limits) -> str | None:
    """By those who know whom they talk to."""
    if in_body is not None:
        return _checked(in_body, "session_id", limits.session_id_chars)
    in_header = headers.get(SESSION_HEADER)
    return None if in_header is None else _checked(in_header, "X-Session-ID", limits.session_id_chars)


def _clean(name: object, limits: Limits) -> str | None:
    if not isinstance(name, str) or not name:
        return None
    if is_name(name, limits.session_id_chars):
        return name
    log.debug("a session name of %d characters is none here, and left out", len(name))
    return None


def _checked(name: str, param: str, longest: int) -> str:
    if not is_name(name, longest):
        raise ApiError(
            f"{param}: must be 1 to {longest} characters out of A-Z a-z 0-9 . _ : -",
            param=param,
            code="invalid_session_id",
        )
    return name
