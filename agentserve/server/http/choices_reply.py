"""One request's reply, whole or as a stream, made of the same pieces; a `Shape` says how they look."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

from agentserve.server.http import choice_parts
from agentserve.server.http.context import ServerContext
from agentserve.server.http.schemas import SamplingFields
from agentserve.server.http.sse import DONE, frame
from agentserve.server.sessions.answer import Delta, Outcome
from agentserve.server.sessions.turns import Started, TurnSpec
from agentserve.server.text_port import JsonObject


class Shape(Protocol):
    """The form of one endpoint's choices. Methods of a stream may keep state per choice."""

    def opening(self, index: int) -> JsonObject | None:
        """The first chunk of a choice: its `choices`, and what else stands beside them. None: no chunk."""
        ...

    def delta(self, index: int, piece: Delta) -> JsonObject:
        """The choice in a chunk with text or calls."""
        ...

    def ending(self, index: int, outcome: Outcome, rest: Delta | None) -> JsonObject:
        """The choice in its last chunk; `rest`: ids and log-probabilities that no delta had."""
        ...

    def choice(self, index: int, outcome: Outcome) -> JsonObject:
        """The choice of a whole reply."""
        ...


class ChoicesReply:
    """The groups' turns as one JSON object, or as the frames of a stream. One group a prompt."""

    def __init__(
        self,
        context: ServerContext,
        fields: SamplingFields,
        groups: Sequence[Sequence[TurnSpec]],
        shape: Shape,
        *,
        base: JsonObject,
        id_prefix: str,
    ) -> None:
        """`base`: fields of every chunk and of the whole, besides those that all replies have."""
        self._context = context
        self._groups = groups
        self._shape = shape
        options = fields.stream_options
        self._live_usage = bool(options and options.continuous_usage_stats)
        self._usage_asked = bool(options and options.include_usage) or context.options.force_usage
        self._prompt = sum(len(group[0].prompt) for group in groups)
        self._counts = [0] * sum(len(group) for group in groups)  # tokens streamed, by choice
        self._base: JsonObject = {
            "id": f"{id_prefix}-{secrets.token_hex(12)}",
            "created": int(context.wall()),
            "model": fields.model or context.options.model,
            "system_fingerprint": f"agentserve-{context.engine.hello.namespace[:12]}",
        } | base

    async def whole(self) -> JsonObject:
        outcomes: dict[int, Outcome] = {}
        async with aclosing(self._context.runner.choices(self._groups)) as pieces:
            async for index, piece in pieces:
                if isinstance(piece, Outcome):
                    outcomes[index] = piece
        choices = [self._shape.choice(index, outcomes[index]) for index in sorted(outcomes)]
        return self._base | {"choices": choices, "usage": self._usage(outcomes)}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        finished: dict[int, Outcome] = {}
        rest: dict[int, Delta] = {}  # a last delta without text: its log-probabilities and ids
        async with aclosing(self._context.runner.choices(self._groups)) as pieces:
            async for index, piece in pieces:
                if isinstance(piece, Started):
                    if opening := self._shape.opening(index):
                        yield self._chunk(opening)
                elif isinstance(piece, Delta):
                    self._counts[index] += len(piece.ids)
                    if piece:
                        yield self._chunk({"choices": [self._shape.delta(index, piece)]})
                    else:
                        rest[index] = piece
                else:
                    finished[index] = piece
                    ending = self._shape.ending(index, piece, rest.get(index))
                    yield self._chunk({"choices": [ending]})
        if self._usage_asked or self._live_usage:
            yield frame(self._base | {"choices": [], "usage": self._usage(finished)})
        yield DONE

    def _chunk(self, content: JsonObject) -> bytes:
        chunk = self._base | content
        if self._live_usage:
            chunk["usage"] = choice_parts.usage(self._prompt, sum(self._counts), [], [])
        elif self._usage_asked:
            chunk["usage"] = None
        return frame(chunk)

    def _usage(self, outcomes: dict[int, Outcome]) -> JsonObject:
        turns = [outcomes[index].usage for index in sorted(outcomes)]
        leaders = turns[:: len(self._groups[0])]
        reasoning = sum(outcome.reasoning_tokens for outcome in outcomes.values())
        return choice_parts.usage(
            self._prompt, sum(turn.generated for turn in turns), leaders, turns, reasoning
        )
