"""What a client says about a session, checked: hints for policies, and a receipt for every field.

Hints are advice. Whatever is said is answered, never raised: accepted as it is, clipped into the bounds
below, deferred (it is kept, and counts later: the receipt says when), or rejected (it is as if it had
not been said). Bounds, and how long each holds:

    expected_wait   seconds to the next turn, 0 to 1e6 (11.6 days); negative is rejected. Of one wait: said
                    while the session waits it counts from then, said while a turn runs from its end
    deadline        seconds from now until which the next first token is wanted, 0 to 1e6. Of one wait too;
                    where it passes and no turn comes, nobody is expected any more
    priority        whole number, -2 to 2. Holds for all turns to come
    final           true or false: no turn comes after this one. If one does, it was wrong and is dropped
    retain          what of its KV is worth keeping: a share of its blocks from the start, 0 to 1, or ranges
                    of tokens {start, end, priority} (`tiering.retention`). Holds for all turns to come

A field that is not named stays as it was; `null` takes it back. Hints never change results: they move
when and where KV is kept, and the break-even bounds of the policy limit what wrong ones cost. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType

import msgspec
from msgspec.structs import replace

from tiering.policy.base import Hints, Span
from tiering.retention import BadSpans, read_spans

MOST_SECONDS = 1e6
MOST_PRIORITY = 2
FIELDS = ("expected_wait", "deadline", "priority", "final", "retain")
MOST_FIELDS = 16  # that are answered: what comes after is not even looked at
NAME_SHOWN = 64  # characters of an unknown field's name in its receipt

AT_TURNS_END = "counts when the turn that runs has ended"
AT_NEXT_REST = "counts after the session's next turn: no worker has its KV now"
IF_IT_GOES_ON = "counts if the session goes on after all"


class Status(StrEnum):
    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    DEFERRED = "deferred"
    REJECTED = "rejected"


Value = bool | int | float | tuple[Span, ...] | None


class Receipt(msgspec.Struct, frozen=True):
    """What became of one field. `value` is what counts now, in the units of the field; None: nothing."""

    status: Status
    value: Value = None
    reason: str = ""


class OneWait(msgspec.Struct, frozen=True):
    """What was said about one wait. Times are of the clock that policies use."""

    expected: float | None = None  # seconds, from `since`
    since: float | None = None  # None: from the beginning of the wait
    deadline: float | None = None
    final: bool = False  # it will not end


class Said(msgspec.Struct, frozen=True):
    """All that a client has said about a session and that still holds."""

    wait: OneWait = OneWait()  # the one that is, or that the running turn has ended
    ahead: OneWait = OneWait()  # the one after the turn that runs
    priority: int = 0
    retain: float | tuple[Span, ...] | None = None
    lent: bool = False  # the priority is not its client's word, but what was made of another

    @property
    def final(self) -> bool:
        return self.wait.final

    def hints(self, now: float) -> Hints:
        """As policies take them, at a moment of the wait. `expected_wait` is what is left of it."""
        wait, kept = self.wait, Hints(priority=self.priority, final=self.final, retain=self.retain)
        if wait.final:
            return kept
        left = None
        if wait.expected is not None:
            left = wait.expected - (now - wait.since if wait.since is not None else 0.0)
            left = left if left >= 0 else None
        return replace(kept, expected_wait=left, deadline=wait.deadline)

    def heard_from(self, now: float) -> Said:
        """Its client is there: a deadline that has passed says nothing of it any more."""
        if self.wait.deadline is None or self.wait.deadline > now:
            return self
        return replace(self, wait=replace(self.wait, deadline=None))

    def completed(self, now: float) -> Said:
        """A turn is complete, and the wait after it begins."""
        ahead, before = self.ahead, self.wait
        if before.final:  # it went on after all: what was deferred for that counts now
            ahead = replace(
                ahead,
                expected=before.expected if ahead.expected is None else ahead.expected,
                deadline=before.deadline if ahead.deadline is None else ahead.deadline,
            )
        since = None if ahead.expected is None else now
        return replace(self, wait=replace(ahead, since=since), ahead=OneWait())

    def rolled_back(self, now: float) -> Said:
        """A turn came to nothing: the wait before it goes on, with what was said meanwhile."""
        wait, ahead = self.wait, self.ahead
        if ahead.expected is not None:
            wait = replace(wait, expected=ahead.expected, since=now)
        if ahead.deadline is not None:
            wait = replace(wait, deadline=ahead.deadline)
        return replace(self, wait=replace(wait, final=wait.final or ahead.final), ahead=OneWait())


class Heard(msgspec.Struct, frozen=True):
    """What a client's fields come to."""

    said: Said
    receipts: Mapping[str, Receipt]
    news: Hints  # as they are now, `expected_wait` only if it was said just now: a wait is heard of once


def receive(raw: Mapping[str, object], now: float) -> tuple[Hints, Mapping[str, Receipt]]:
    """Hints of a session of which nothing was said before, and a receipt per field of `raw`."""
    heard = hear(Said(), raw, now)
    return heard.news, heard.receipts


def hear(
    said: Said,
    raw: Mapping[str, object],
    now: float,
    *,
    running: bool = False,
    held: bool = True,
    lent: bool = False,
) -> Heard:
    """Take in fields as a client sent them, of any type; a receipt for each, in their order.

    now: of the clock that policies use. running: a turn of the session runs. held: a worker knows it.
    lent: a priority among them is not the client's own word.
    """
    said = said.heard_from(now)
    receipts: dict[str, Receipt] = {}
    for name, value in raw.items():
        if len(receipts) == MOST_FIELDS:
            break
        receipt = _read(name, value)
        receipts[str(name)[:NAME_SHOWN]] = receipt
        if name in FIELDS and receipt.status is not Status.REJECTED:
            said = _with(said, name, receipt.value, now, running=running)
            if name == "priority":
                said = replace(said, lent=lent)
    final = (said.ahead if running else said.wait).final
    for name, receipt in receipts.items():
        why = AT_TURNS_END if running else ""
        if name in ("expected_wait", "deadline"):
            why = IF_IT_GOES_ON if final else why
        elif name != "final" and not held:
            why = why or AT_NEXT_REST
        if why and receipt.value is not None:
            receipts[name] = _deferred(receipt, why)
    news = said.hints(now)
    if said.wait.since != now or receipts.get("expected_wait") is None:
        news = replace(news, expected_wait=None)
    return Heard(said, MappingProxyType(receipts), news)


def _with(said: Said, name: str, value: Value, now: float, *, running: bool) -> Said:
    """None takes the field back, from whichever wait it was said about."""
    if name == "priority":
        assert value is None or isinstance(value, int)
        return replace(said, priority=value or 0)
    if name == "retain":
        return replace(said, retain=value)
    changes: dict[str, Value]
    match name:
        case "expected_wait":
            changes = {"expected": value} if running else {"expected": value, "since": now}
        case "deadline":
            assert value is None or isinstance(value, float)
            changes = {"deadline": None if value is None else now + value}
        case _:
            changes = {"final": bool(value)}
    if value is None or value is False:
        said = replace(said, wait=replace(said.wait, **changes))
    place = said.ahead if running else said.wait
    return replace(said, **{"ahead" if running else "wait": replace(place, **changes)})


def _deferred(receipt: Receipt, why: str) -> Receipt:
    """What was clipped stays so; what it is told is when it counts."""
    if receipt.status is Status.CLIPPED:
        return replace(receipt, reason=f"{receipt.reason}; {why}")
    return replace(receipt, status=Status.DEFERRED, reason=why)


def _read(name: str, value: object) -> Receipt:
    if name not in FIELDS:
        return Receipt(Status.REJECTED, None, f"unknown; there are: {', '.join(FIELDS)}")
    if value is None:
        return Receipt(Status.ACCEPTED, None, "taken back")
    if name == "final":
        if isinstance(value, bool):
            return Receipt(Status.ACCEPTED, value)
        return Receipt(Status.REJECTED, None, "must be true or false")
    if name == "retain" and isinstance(value, list | tuple):
        return _read_ranges(value)
    number = _number(value)
    if number is None:
        wanted = "a finite number, or a list of ranges" if name == "retain" else "a finite number"
        return Receipt(Status.REJECTED, None, f"must be {wanted}")
    if name == "priority":
        if number != int(number):
            return Receipt(Status.REJECTED, None, "must be a whole number")
        return _clipped(int(number), -MOST_PRIORITY, MOST_PRIORITY)
    if number < 0:
        return Receipt(Status.REJECTED, None, "must not be negative")
    return _clipped(number, 0.0, 1.0 if name == "retain" else MOST_SECONDS)


def _read_ranges(value: Sequence[object]) -> Receipt:
    try:
        spans, notes = read_spans(value)
    except BadSpans as error:
        return Receipt(Status.REJECTED, None, str(error))
    return Receipt(Status.CLIPPED if notes else Status.ACCEPTED, spans, notes)


def _number(value: object) -> float | None:
    """As a float, if it is a number that one can hold and nothing else: no text, no truth values."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of 400 digits
        return None
    return number if math.isfinite(number) else None


def _clipped(value: float, least: float, most: float) -> Receipt:
    kept = min(max(value, least), most)
    if kept == value:
        return Receipt(Status.ACCEPTED, kept)
    return Receipt(Status.CLIPPED, kept, f"must be {least:g} to {most:g}")
