"""What sampling says of a row that gave no token. By itself: ranks that follow a leader sample nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NotSampled:
    """A row that gave no token, and why, in one line. The other rows are not touched by it."""

    error: str
    refused: bool = False  # the request is at fault
