"""Which prompts may share KV: a namespace for each salt, under the model's own."""

from __future__ import annotations

from tiering.keys import namespace_digest

_KEPT = 4096


class Namespaces:
    """Digests by salt. A cache of a pure function, so it may be emptied."""

    def __init__(self, base: bytes) -> None:
        """base: digest of what all KV of this core depends on (`CoreConfig.namespace`)."""
        self._base = base
        self._known: dict[str, bytes] = {}

    def of(self, salt: str) -> bytes:
        """32 bytes."""
        found = self._known.get(salt)
        if found is None:
            if len(self._known) >= _KEPT:
                self._known.clear()
            found = self._known[salt] = namespace_digest({"base": self._base, "salt": salt})
        return found
