"""Cuts assistant turns out of a rendered conversation, so that the ids they were generated as can go there.

A turn of text is rendered as one mark. A turn with calls keeps its calls, because some templates render
results of tools by the calls before them: its mark opens the name of the first one, and another opens
the first result, before which the turn has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
    *,
    tails: Mapping[int, str],
) -> list[Splice]:
    """How each turn is cut out; `as_text`: those whose calls could not be found as such, `tails`: as
    `ChatTemplate.tail` had it when they were generated."""
    splices = []
    for index in sorted(indices):
        frame = frames.behind(messages[index - 1].role if index else None).begun(tails.get(index, ""))
        has_results = index + 1 < len(messages) and messages[index + 1].role == "tool"
        called = bool(messages[index].calls) and has_results and frame.call_heads and index not in as_text
        splices.append(Splice(index, take(), take() if called else "", frame))
    return splices


def cut(text: str, splices: Sequence[Splice], ends: Ends) -> tuple[str, set[int]]:
    """`text` with each turn as its mark alone, behind what its generation prompt ended with; and the
    turns that were not found."""
    marks = frozenset(mark for splice in splices for mark in (splice.mark, splice.until) if mark)
    places: dict[str, int] = {}
    for found in find_characters(marks, text):  # in one pass: a history may have thousands
        places.setdefault(found.group(), found.start())
    pieces: list[str] = []
    lost: set[int] = set()
    at, last = 0, ""
    for splice in splices:
        region = _region(text, splice, places, ends)
        if region is None or region[0] < at:
            lost.add(splice.index)
            continue
        pieces += (_without(text[at : region[0]], last), splice.frame.opening, splice.mark)
        at, last = region[1], splice.mark + splice.until if splice.until else ""
    pieces.append(_without(text[at:], last))
    text = "".join(pieces)
    shown = Counter(found.group() for found in find_characters(marks, text))
    # Shown twice, or a result's mark where another turn's results are: what was cut is not all of it.
    lost |= {splice.index for splice in splices if shown[splice.mark] != 1 or shown[splice.until]}
    return text, lost


def _without(text: str, marks: str) -> str:
    for mark in marks:
        text = text.replace(mark, "")
    return text


def _region(text: str, splice: Splice, places: dict[str, int], ends: Ends) -> tuple[int, int] | None:
    """From where the turn's generation began to where it ended."""
    place = places.get(splice.mark)
    if place is None:
        return None
    heads = splice.frame.call_heads if splice.until else splice.frame.heads
    head = next((head for head in heads if text.startswith(head, place - len(head))), None)
    if head is None:
        return None
    if not splice.until:
        return place - len(head), place + 1
    until = places.get(splice.until, -1)
    if until < place:
        return None
    last = max(ends(text[place:until]), default=None)
    return None if last is None else (place - len(head), place + last)
