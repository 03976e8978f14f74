"""A turn's reasoning, counted: a fold over its generated tokens."""

from __future__ import annotations

from agentserve.types import ReasoningCap


class ReasoningFold:
    """What was reasoned so far. Reasoning begins with the prompt's end or the answer's first token: behind
    that the token which opens it is something said (as the parsers of replies have it)."""

    def __init__(self, cap: ReasoningCap) -> None:
        self._cap = cap
        self._inside = cap.inside
        self._spent = 0
        self._first = True

    def push(self, token: int) -> None:
        first, self._first = self._first, False
        if not self._inside:
            self._inside = first and token == self._cap.open
        elif token == self._cap.close:
            self._inside = False
        else:
            self._spent += 1

    @property
    def due(self) -> int | None:
        """The token that must come next, where the reasoning has to end."""
        return self._cap.close if self._inside and self._spent >= self._cap.tokens else None
