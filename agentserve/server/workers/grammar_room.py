"""How many compiled grammars workers keep."""

from __future__ import annotations

from collections.abc import Collection, Mapping

MAX_GRAMMARS = 256
MAX_GRAMMAR_BYTES = 128 * 2**20


def surplus(grammars: Mapping[str, str], used: Collection[str | None]) -> list[str]:
    """Names of those to drop. grammars: compiled, by name, the newest last; it and what is used stay."""
    count, size = len(grammars), sum(len(compiled) for compiled in grammars.values())
    gone: list[str] = []
    for name, compiled in list(grammars.items())[:-1]:
        if count - len(gone) <= MAX_GRAMMARS and size <= MAX_GRAMMAR_BYTES:
            break
        if name not in used:
            gone.append(name)
            size -= len(compiled)
    return gone
