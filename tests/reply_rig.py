"""Replies as a client sees them: deltas joined, their order checked on the way."""

from __future__ import annotations

from collections.abc import Iterable

from tools_bridge.deltas import (
    ArgumentsDelta,
    CallClosed,
    CallOpened,
    ContentDelta,
    Delta,
    Parsed,
    PartialCall,
    ReasoningDelta,
)
from tools_bridge.parser import ReplyParser


def join(deltas: Iterable[Delta]) -> Parsed:
    content, reasoning, calls = "", "", []
    for delta in deltas:
        match delta:
            case ContentDelta(text):
                assert text
                content += text
            case ReasoningDelta(text):
                assert text
                reasoning += text
            case CallOpened(index, name):
                assert index == len(calls)
                assert all(error is not None for _, _, error in calls)
                calls.append([name, "", None])
            case ArgumentsDelta(index, text):
                assert text
                assert index == len(calls) - 1
                assert calls[index][2] is None
                calls[index][1] += text
            case CallClosed(index, error):
                assert index == len(calls) - 1
                assert calls[index][2] is None
                calls[index][2] = error
    assert all(error is not None for _, _, error in calls)
    return Parsed(content, tuple(PartialCall(n, a, e == "", e) for n, a, e in calls), reasoning=reasoning)


def read(parser: ReplyParser, pieces: Iterable[str], *, cut: bool = False) -> Parsed:
    """What the parser makes of the pieces; its deltas and its own account must agree."""
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    deltas += parser.finish(cut=cut)
    joined, parsed = join(deltas), parser.parsed
    assert (joined.content, joined.reasoning, joined.calls) == (
        parsed.content,
        parsed.reasoning,
        parsed.calls,
    )
    return parsed
