"""Cuts assistant turns out of a rendered conversation, so that the ids they were generated as can go there.

A turn of text is rendered as one mark. A turn with calls keeps its calls, because some templates render
results of tools by the calls before them: its mark opens the name of the first one, and another opens
the first result, before which the turn has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from agentserve.text.conversation import Message
from agentserve.text.frames import Frames, TurnFrame
from agentserve.text.hiding import find_characters

Ends = Callable[[str], Iterable[int]]
"""Where in a text the control tokens that can end a turn begin, in order."""


@dataclass(frozen=True, slots=True)
class Splice:
    """One turn to be cut out. `until`: the mark that opens the first result; "": a turn of text."""

    index: int  # of its message
    mark: str
    until: str
    frame: TurnFrame


def marked(messages: Sequence[Message], splices: Iterable[Splice]) -> list[Message]:
    """The conversation with marks instead of what is to be cut out."""
    out = list(messages)
    for splice in splices:
        turn = out[splice.index]
        if not splice.until:
            out[splice.index] = replace(turn, parts=(splice.mark,), calls=(), reasoning=None)
            continue
        first = replace(turn.calls[0], name=splice.mark + turn.calls[0].name)
        out[splice.index] = replace(turn, parts=(), calls=(first, *turn.calls[1:]), reasoning=None)
        result = out[splice.index + 1]
        out[splice.index + 1] = replace(result, parts=(splice.until + result.text,))
    return out


def plan(
    messages: Sequence[Message],
    indices: Iterable[int],
    as_text: Collection[int],
    frames: Frames,
    take: Callable[[], str],
) -> list[Splice]:
    """How each turn is cut out; `as_text`: those whose calls could not be found as such."""
    splices = []
    for index in sorted(indices):
        frame = frames.behind(messages[index - 1].role if index else None)
        has_results = index + 1 < len(messages) and messages[index + 1].role == "tool"
        called = bool(messages[index].calls) and has_results and frame.call_heads and index not in as_text
        splices.append(Splice(index, take(), take() if called else "", frame))
    return splices


def cut(text: str, splices: Sequence[Splice], ends: Ends) -> tuple[str, set[int]]:
    """`text` with each turn as its mark alone, behind what its generation prompt ended with; and the
    turns that were not found."""
    marks = [mark for splice in splices for mark in (splice.mark, splice.until) if mark]
    places: dict[str, int] = {}
    shown: Counter[str] = Counter()
    for found in find_characters(frozenset(marks), text):  # in one pass: a history may have thousands
        shown[found.group()] += 1
        places.setdefault(found.group(), found.start())
    drop = dict.fromkeys(map(ord, marks))
    pieces: list[str] = []
    lost: set[int] = set()
    at = 0
    for splice in splices:
        region = _region(text, splice, places, shown, ends)
        if region is None or region[0] < at:
            lost.add(splice.index)
            continue
        pieces += (text[at : region[0]].translate(drop), splice.frame.opening, splice.mark)
        at = region[1]
    pieces.append(text[at:].translate(drop))
    return "".join(pieces), lost


def _region(
    text: str, splice: Splice, places: dict[str, int], shown: Counter[str], ends: Ends
) -> tuple[int, int] | None:
    """From where the turn's generation began to where it ended."""
    place = places.get(splice.mark)
    if place is None or (not splice.until and shown[splice.mark] != 1):
        return None
    heads = splice.frame.call_heads if splice.until else splice.frame.heads
    head = next((head for head in heads if text.startswith(head, place - len(head))), None)
    if head is None:
        return None
    if not splice.until:
        return place - len(head), place + 1
    until = places.get(splice.until, -1)
    if shown[splice.until] != 1 or until < place:
        return None
    last = max(ends(text[place:until]), default=None)
    return None if last is None else (place - len(head), place + last)
