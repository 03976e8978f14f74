"""What is told in the log of a request's parts that were left out: one line, however many there were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from agentserve.tenant_names import has_key

MOST_LISTED = 8
_MOST_CHARS = 40
_LOOKED_AT = 200  # characters of each: a key that begins among those that are told is in them


def listed(kinds: Iterable[str]) -> str:
    """The kinds, each once, with how many of them there were: of many the first few."""
    counts = Counter("(a key)" if has_key(kind[:_LOOKED_AT]) else kind[:_MOST_CHARS] for kind in kinds)
    told = [f"{kind!r} ({count})" for kind, count in list(counts.items())[:MOST_LISTED]]
    more = len(counts) - len(told)
    return ", ".join(told) + (f", and {more} more" if more else "")
