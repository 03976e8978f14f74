"""From one turn's tokens to what the client sees: text, reasoning, tool calls, log-probabilities.

A fold: it knows no engine and no clock. Streaming and not streaming use it alike, so they agree.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from agentserve.messages import Token, TurnUsage
from agentserve.server.sessions.stopcut import StopCutter
from agentserve.server.text_port import Detokenizer
from agentserve.types import FinishReason


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a tool call. `id` and `name` come with the first piece only."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None
    broken: bool = False  # the last piece, of a call that is not to be run; it may be empty


@dataclass(frozen=True, slots=True)
class Call:
    id: str
    name: str
    arguments: str  # JSON text
    complete: bool


class Found(NamedTuple):
    """What became certain with a piece of text."""

    text: str
    calls: list[CallDelta]
    reasoning: str = ""

    def followed_by(self, more: Found) -> Found:
        return Found(self.text + more.text, self.calls + more.calls, self.reasoning + more.reasoning)


class ToolParser(Protocol):
    """Finds tool calls and reasoning in growing text; joined deltas equal the parse of the whole text."""

    def push(self, piece: str) -> Found:
        """What is certain now."""
        ...

    def finish(self, *, cut: bool) -> Found:
        """What remains; call once, at the end of the text, or where it was `cut` off."""
        ...

    @property
    def thinking(self) -> bool:
        """The text so far ends within reasoning."""
        ...

    @property
    def calls(self) -> list[Call]: ...

    @property
    def truncated(self) -> bool:
        """The text ended within a call."""
        ...


class CallsOnly:
    """A parser for answers that are held to be calls: text is no part of them, but for reasoning.

    Where such an answer is cut, what is left over is the beginning of a call, not something said.
    """

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser

    def push(self, piece: str) -> Found:
        return self._parser.push(piece)._replace(text="")

    def finish(self, *, cut: bool) -> Found:
        return self._parser.finish(cut=cut)._replace(text="")

    @property
    def thinking(self) -> bool:
        return self._parser.thinking

    @property
    def calls(self) -> list[Call]:
        return self._parser.calls

    @property
    def truncated(self) -> bool:
        return self._parser.truncated


@dataclass(frozen=True, slots=True)
class Delta:
    """What became certain with some tokens."""

    text: str = ""
    calls: tuple[CallDelta, ...] = ()
    tokens: tuple[Token, ...] = ()  # those that are part of the text
    ids: tuple[int, ...] = ()  # all tokens since the last delta, the end token included
    reasoning: str = ""  # comes before text and calls

    def __bool__(self) -> bool:
        return bool(self.text or self.calls or self.reasoning)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished turn. `generated` None: the ids do not spell the text that was shown."""

    reason: FinishReason
    text: str
    calls: tuple[Call, ...]
    truncated: bool  # the text ended within a call
    tokens: tuple[Token, ...]  # without the token that ended the turn
    ids: tuple[int, ...]  # with it
    generated: array[int] | None
    usage: TurnUsage
    reasoning: str = ""  # no part of `text`
    reasoning_tokens: int = 0  # of `tokens`: the marks around the reasoning count
    stop: str | None = None  # the stop string that ended it

    @property
    def has_calls(self) -> bool:
        """The turn hands its client tool calls to run, every one of them whole."""
        return bool(self.calls) and not self.truncated and all(call.complete for call in self.calls)

    @property
    def handed(self) -> dict[str, bool]:
        """The ids of its calls, and whether they are to be run. Of a reply that ended within one, or has
        one that is malformed, none is: no turn waits for them, and the next message may follow at once."""
        return dict.fromkeys((call.id for call in self.calls), self.has_calls)


class Answer:
    """Tokens in, deltas out, an outcome at the end."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stops: tuple[str, ...] = (),
        end_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        parser: ToolParser | None = None,
        decode: Callable[[array[int]], str],
    ) -> None:
        self._detokenizer = detokenizer
        self._cutter = StopCutter(stops)
        self._end_ids = end_ids
        self._min_tokens = min_tokens
        self._parser = parser
        self._decode = decode
        self._tokens: list[Token] = []
        self._pending: list[Token] = []  # not yet part of a delta
        self._sent = 0  # how many tokens' ids were handed out
        self._end: Token | None = None  # an end token; shown only if the turn goes on after it
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._thought = 0  # tokens of the reasoning
        self._raw: list[str] = []  # as cut at stop strings, tool calls not yet taken out

    @property
    def stopped(self) -> bool:
        """A stop string is complete; nothing more will be shown."""
        return self._cutter.hit is not None

    @property
    def count(self) -> int:
        return len(self._tokens)

    def push(self, token: Token) -> Delta:
        """Take the next token. An empty delta means that nothing is certain yet."""
        self._tokens.append(token)
        if self.stopped:
            return Delta()
        piece = ""
        if self._end is not None:
            piece, self._end = self._show(self._end), None
        if token.token in self._end_ids:
            self._end = token
        else:
            piece += self._show(token)
        return self._delta(self._split(piece))

    def finish(self, reason: FinishReason, usage: TurnUsage) -> tuple[Delta, Outcome]:
        """The last delta and the whole answer."""
        piece = ""
        ended_by_token = self._end is not None and reason is FinishReason.STOP
        if self._end is not None and not ended_by_token:
            piece = self._show(self._end)
        rest = "" if self.stopped else self._cutter.push(self._detokenizer.flush(), active=False)
        if not self.stopped:
            rest += self._cutter.flush()
        self._raw.append(rest)
        found = self._split(piece + rest)
        if self._parser is not None:
            found = found.followed_by(self._parser.finish(cut=reason is not FinishReason.STOP))
        delta = self._delta(found, last=True)
        outcome = Outcome(
            reason=reason,
            text="".join(self._text),
            calls=tuple(self._parser.calls) if self._parser else (),
            truncated=bool(self._parser and self._parser.truncated),
            tokens=tuple(self._tokens[:-1] if ended_by_token else self._tokens),
            ids=tuple(token.token for token in self._tokens),
            generated=self._generated(ended_by_token),
            usage=usage,
            stop=self._cutter.hit,
            reasoning="".join(self._reasoning),
            reasoning_tokens=self._thought,
        )
        return delta, outcome

    def _show(self, token: Token) -> str:
        self._pending.append(token)
        piece = self._detokenizer.push(token.token)
        shown = self._cutter.push(piece, active=token.index + 1 >= self._min_tokens)
        self._raw.append(shown)
        return shown

    def _split(self, piece: str) -> Found:
        if self._parser is None or not piece:
            return Found(piece, [])
        before = self._parser.thinking
        found = self._parser.push(piece)
        if before or self._parser.thinking or found.reasoning:
            self._thought = len(self._tokens)  # reasoning comes first
        return found

    def _delta(self, found: Found, last: bool = False) -> Delta:
        text, calls, reasoning = found
        self._text.append(text)
        self._reasoning.append(reasoning)
        if not (text or calls or reasoning or last):
            return Delta()
        tokens, self._pending = tuple(self._pending), []
        until = len(self._tokens) - (1 if self._end is not None and not last else 0)
        ids = tuple(token.token for token in self._tokens[self._sent : until])
        self._sent = until
        return Delta(text, tuple(calls), tokens, ids, reasoning)

    def _generated(self, ended_by_token: bool) -> array[int] | None:
        """The ids that spell exactly the shown text, for splicing into the next turn's prompt."""
        parser = self._parser
        if parser is not None and parser.truncated and all(call.complete for call in parser.calls):
            return None  # the beginning of a call that nobody was shown: the model need not see it either
        ids = array("i", (token.token for token in self._tokens))
        if ended_by_token:
            return ids[:-1]
        if not self.stopped:
            return ids
        # A stop string was cut off: it may begin within a token, then no ids spell the rest.
        shown = "".join(self._raw)
        for length in range(len(ids), -1, -1):
            text = self._decode(ids[:length])
            if len(text) <= len(shown):
                return ids[:length] if text == shown else None
        return None
