"""Retention by range: which of a session's own blocks are to be lost first. Pure.

A client may say how much runs of its tokens are wanted (as TensorRT-LLM's `KvCacheRetentionConfig` lets
it: priorities of 0 to 100, 35 where nothing is said). Here a priority is never a claim on others: it
becomes a *weight* of at most 1, by which a block is worth less than the session's blocks are by
themselves. So a hint can make blocks of its own session go earlier, and nobody else's.

The highest priority of a session's blocks weighs 1, the others in proportion: priorities compare a
session's blocks with each other. A block is of use only behind all that come before it, so it weighs at
least what the blocks after it do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tiering.policy.base import Span

MOST_SPANS = 16
MOST_PRIORITY = 100
UNNAMED_PRIORITY = 35  # of tokens in no range; TensorRT-LLM's default
MOST_TOKENS = 2**31 - 1

Runs = tuple[tuple[int, float], ...]
"""(end, weight) of runs of blocks, in order, each from the end of the one before; weights fall, each in
[0, 1]. Blocks behind the last run weigh as that does; no runs: everything weighs 1."""


def runs_of(retain: float | Sequence[Span] | None, blocks: int, page_size: int) -> Runs:
    """Weights of a session's first `blocks` blocks. A block weighs as its most wanted token."""
    if retain is None or blocks <= 0:
        return ()
    if not isinstance(retain, Sequence):
        kept = min(math.ceil(retain * blocks), blocks)
        return _merged([(kept, 1.0), (blocks, 0.0)])
    spans = [(span.start // page_size, _end(span, blocks, page_size), span.priority) for span in retain]
    edges = sorted({blocks} | {edge for start, end, _ in spans for edge in (start, end) if 0 < edge < blocks})
    runs: list[tuple[int, float]] = []
    wanted = 0
    for index in range(len(edges) - 1, -1, -1):
        first = edges[index - 1] if index else 0
        here = [priority for start, end, priority in spans if start <= first < end]
        wanted = max(wanted, max(here, default=UNNAMED_PRIORITY))
        runs.append((edges[index], float(wanted)))
    most = runs[-1][1]
    return _merged([(end, weight / most if most else 0.0) for end, weight in reversed(runs)])


def _end(span: Span, blocks: int, page_size: int) -> int:
    return blocks if span.end is None else -(-span.end // page_size)


def _merged(runs: Sequence[tuple[int, float]]) -> Runs:
    """Without empty runs, and neighbours of one weight as one."""
    merged: list[tuple[int, float]] = []
    for end, weight in runs:
        if end == (merged[-1][0] if merged else 0):
            continue
        if merged and merged[-1][1] == weight:
            merged.pop()
        merged.append((end, weight))
    return tuple(merged)


def weight_at(runs: Runs, index: int) -> float:
    """The weight of block `index`."""
    for end, weight in runs:
        if index < end:
            return weight
    return runs[-1][1] if runs else 1.0


class BadSpans(ValueError):
    """Why ranges cannot be taken, in a few words for the client."""


def read_spans(value: Sequence[object]) -> tuple[tuple[Span, ...], str]:
    """Ranges as a client sent them, and what was done to make them fit (empty: nothing). BadSpans."""
    if not 0 < len(value) <= MOST_SPANS:
        raise BadSpans(f"must be 1 to {MOST_SPANS} ranges")
    notes: dict[str, None] = {}
    return tuple(_span(index, item, notes) for index, item in enumerate(value)), "; ".join(notes)


def _span(index: int, item: object, notes: dict[str, None]) -> Span:
    if not isinstance(item, Mapping):
        raise BadSpans(f"[{index}] must be {{start, end, priority}}")
    start = _whole(index, item, "start", MOST_TOKENS, notes)
    priority = _whole(index, item, "priority", MOST_PRIORITY, notes)
    end = None if item.get("end") is None else _whole(index, item, "end", MOST_TOKENS, notes)
    if end is not None and end <= start:
        raise BadSpans(f"[{index}].end must be greater than start")
    if any(name not in ("start", "end", "priority") for name in item):
        notes["ranges have start, end and priority alone"] = None
    return Span(start, end, priority)


def _whole(index: int, item: Mapping[str, object], name: str, most: int, notes: dict[str, None]) -> int:
    value = item.get(name)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole and not (isinstance(value, float) and value.is_integer()):
        raise BadSpans(f"[{index}].{name} must be a whole number")
    number: int = int(value)  # type: ignore[call-overload]
    if number < 0 and name != "priority":
        raise BadSpans(f"[{index}].{name} must not be negative")
    if not 0 <= number <= most:
        notes[f"{name} must be 0 to {most}"] = None
    return min(max(number, 0), most)
