"""What a client says about a session, checked: hints for policies, and a receipt for every field.

Hints are advice. Whatever is said is answered, never raised: accepted as it is, clipped into the bounds
below, deferred (it is kept, and counts later), or rejected (it is as if it had not been said). Bounds:

    expected_wait   seconds from now to the next turn, 0 to 1e6 (11.6 days); negative is rejected
    deadline        seconds from now until which the next first token is wanted, 0 to 1e6
    priority        whole number, -2 to 2
    final           true or false
    retain          share of its blocks, from the start, that are worth keeping: 0 to 1

`null` takes a hint back. Hints never change results: they move when and where KV is kept, and the break-
even bounds of the policy limit what wrong ones cost. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

import msgspec

from tiering.policy.base import Hints

MOST_SECONDS = 1e6
MOST_PRIORITY = 2
FIELDS = ("expected_wait", "deadline", "priority", "final", "retain")
MOST_FIELDS = 16  # that are answered: what comes after is not even looked at
NAME_SHOWN = 64  # characters of an unknown field's name in its receipt


class Status(StrEnum):
    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    DEFERRED = "deferred"
    REJECTED = "rejected"


Value = bool | int | float | None


class Receipt(msgspec.Struct, frozen=True):
    """What became of one field. `value` is what counts now, in the units of the field; None: nothing."""

    status: Status
    value: Value = None
    reason: str = ""


def receive(raw: Mapping[str, object], now: float) -> tuple[Hints, Mapping[str, Receipt]]:
    """Hints as policies take them, and a receipt per field of `raw`, in its order.

    raw: fields as a client sent them, of any type; now: of the clock that policies use, for `deadline`.
    Fields that are absent stay absent: the hints replace what was said before.
    """
    kept: dict[str, Value] = {}
    receipts: dict[str, Receipt] = {}
    for name, value in raw.items():
        if len(receipts) == MOST_FIELDS:
            break
        receipt = _read(name, value)
        receipts[str(name)[:NAME_SHOWN]] = receipt
        if name in FIELDS and receipt.status is not Status.REJECTED and receipt.value is not None:
            kept[name] = receipt.value
    if kept.get("final"):
        for name in ("expected_wait", "deadline"):
            if kept.pop(name, None) is not None:
                said = receipts[name]
                receipts[name] = Receipt(
                    Status.DEFERRED, said.value, "counts if the session goes on after all"
                )
    return _hints(kept, now), MappingProxyType(receipts)


def _hints(kept: Mapping[str, Value], now: float) -> Hints:
    wait, deadline, retain = (kept.get(name) for name in ("expected_wait", "deadline", "retain"))
    return Hints(
        expected_wait=None if wait is None else float(wait),
        deadline=None if deadline is None else now + float(deadline),
        priority=int(kept.get("priority") or 0),
        final=bool(kept.get("final")),
        retain=None if retain is None else float(retain),
    )


def _read(name: str, value: object) -> Receipt:
    if name not in FIELDS:
        return Receipt(Status.REJECTED, None, f"unknown; there are: {', '.join(FIELDS)}")
    if value is None:
        return Receipt(Status.ACCEPTED, None, "taken back")
    if name == "final":
        if isinstance(value, bool):
            return Receipt(Status.ACCEPTED, value)
        return Receipt(Status.REJECTED, None, "must be true or false")
    number = _number(value)
    if number is None:
        return Receipt(Status.REJECTED, None, "must be a finite number")
    if name == "priority":
        if number != int(number):
            return Receipt(Status.REJECTED, None, "must be a whole number")
        return _clipped(int(number), -MOST_PRIORITY, MOST_PRIORITY)
    if number < 0:
        return Receipt(Status.REJECTED, None, "must not be negative")
    return _clipped(number, 0.0, 1.0 if name == "retain" else MOST_SECONDS)


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
