"""What a reply holds besides plain text, whatever form the model writes calls in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PartialCall:
    """A call as far as it is known. `complete` calls are whole, well-formed and may be run."""

    name: str
    arguments: str = ""  # raw JSON text so far
    complete: bool = False
    error: str = ""  # "truncated" or "malformed": never to be run


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a text holds. `cut`: `content` ends in the beginning of a call that has no name yet."""

    content: str
    calls: tuple[PartialCall, ...]
    cut: bool = False
    reasoning: str = ""

    @property
    def truncated(self) -> bool:
        """Whether the text ended inside a call."""
        return self.cut or any(call.error == "truncated" for call in self.calls)


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Of what the model thought before, or between, what it said."""

    text: str


@dataclass(frozen=True, slots=True)
class CallOpened:
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallClosed:
    index: int
    error: str  # as `PartialCall.error`; "" for a complete call


Delta = ContentDelta | ReasoningDelta | CallOpened | ArgumentsDelta | CallClosed


def joined(deltas: list[Delta]) -> list[Delta]:
    """Neighbouring text deltas of the same kind made one."""
    out: list[Delta] = []
    for delta in deltas:
        last = out[-1] if out else None
        if isinstance(delta, ContentDelta) and isinstance(last, ContentDelta):
            out[-1] = ContentDelta(last.text + delta.text)
        elif isinstance(delta, ReasoningDelta) and isinstance(last, ReasoningDelta):
            out[-1] = ReasoningDelta(last.text + delta.text)
        elif isinstance(delta, ArgumentsDelta) and isinstance(last, ArgumentsDelta):
            out[-1] = ArgumentsDelta(delta.index, last.text + delta.text)
        else:
            out.append(delta)
    return out
