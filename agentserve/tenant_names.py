"""What a tenant may be called: never like a key, for names are shown, logged and written down. Pure."""

from __future__ import annotations

import re

KEY_PREFIX, KEY_ID_DIGITS = "ask_", 12
MOST_CHARS = 64
_NAME = re.compile(r"[A-Za-z0-9._:\-]+")
_BEGUN = re.compile(rf"{KEY_PREFIX}[0-9a-f]{{{KEY_ID_DIGITS}}}_[0-9a-f]", re.IGNORECASE)


def has_key(text: str) -> bool:
    """A key, or the beginning of one."""
    return _BEGUN.search(text) is not None


def is_tenant(name: str) -> bool:
    """Whether a tenant may be called so."""
    return len(name) <= MOST_CHARS and _NAME.fullmatch(name) is not None and not has_key(name)
