"""What sampling says of a row that gave no token. By itself: a rank that follows runs steps and samples nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NotSampled:
    """A row that gave no token, and why, in one line. The other rows are not touched by it."""

    error: str
    refused: bool = False  # the request is at fault
