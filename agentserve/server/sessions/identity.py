"""Names of sessions and calls. Those from outside are checked, and never used as internal keys."""

from __future__ import annotations

import re
import secrets

DEFAULT_TENANT = "default"

_SESSION = re.compile(r"sess[-_][0-9a-f]{24,32}")  # of chats, of agents
_NAME = re.compile(r"[A-Za-z0-9._:\-]+")


def is_name(text: str, longest: int) -> bool:
    """Whether a client may give a thing this name: 1 to `longest` of A-Z a-z 0-9 . _ : -"""
    return len(text) <= longest and _NAME.fullmatch(text) is not None


def is_session_id(text: str) -> bool:
    """Whether a session of this server may have this id."""
    return _SESSION.fullmatch(text) is not None


def new_session_id() -> str:
    return f"sess-{secrets.token_hex(12)}"


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
