"""What a client asks of a reply's form, not yet a grammar: a value that goes to the process that makes one.

Schemas are rewritten there, with the bounds of time and memory that compiling has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from tools_bridge.grammar import GrammarSource, ResponseFormat, Thinking, ToolChoice, reply_grammar
from tools_bridge.holding import RESPONSE_PLACE, tool_place
from tools_bridge.parser import Think
from tools_bridge.registry import BY_NAME, ReplyForm
from tools_bridge.types import ToolSpec


class Asked(msgspec.Struct, frozen=True):
    """The arguments of `reply_grammar`; of the syntax, the names by which it is found again."""

    family: str  # one of the registry's
    think: tuple[str, str] | None
    tools: list[ToolSpec]
    choice: ToolChoice
    parallel: bool
    response: ResponseFormat
    thinking: Thinking


@dataclass(frozen=True, slots=True)
class GrammarRequest:
    """An encoded `Asked`. Equal ones of one owner have equal ids, in every process."""

    data: bytes
    owner: str = ""  # who alone is to find what was made of it
    id: str = field(init=False)

    def __post_init__(self) -> None:
        owner = b"" if not self.owner else b"%d:%s" % (len(self.owner.encode()), self.owner.encode())
        object.__setattr__(self, "id", hashlib.sha256(owner + self.data).hexdigest()[:32])

    def loose(self) -> set[str]:
        """The places of schemas that may be held to less than they say."""
        asked = msgspec.msgpack.decode(self.data, type=Asked)
        called = asked.tools if asked.choice.mode == "required" else []  # of others nothing is held
        found = {tool_place(tool.name) for tool in called if not tool.strict}
        if asked.response.kind == "json_schema" and not asked.response.strict:
            found.add(RESPONSE_PLACE)
        return found


def grammar_request(
    form: ReplyForm,
    tools: list[ToolSpec],
    choice: ToolChoice,
    *,
    parallel: bool,
    response: ResponseFormat,
    thinking: Thinking,
    owner: str = "",
) -> GrammarRequest:
    """ValueError, RecursionError: something in it cannot be written down (a number beyond 64 bits, a half of
    a character, too deep a schema)."""
    think = (form.think.open, form.think.close) if form.think else None
    asked = Asked(form.family.name, think, tools, choice, parallel, response, thinking)
    try:
        return GrammarRequest(msgspec.msgpack.encode(asked), owner)
    except OverflowError:
        raise ValueError("a schema's whole numbers may have at most 64 bits") from None


def source_of(request: bytes, let_go: Mapping[str, str]) -> GrammarSource | None:
    """Pure and slow; None where any text will do. `let_go`: see `reply_grammar`. GrammarError."""
    asked = msgspec.msgpack.decode(request, type=Asked)
    form = ReplyForm(BY_NAME[asked.family], Think(*asked.think) if asked.think else None)
    return reply_grammar(
        asked.tools,
        asked.choice,
        parallel=asked.parallel,
        response=asked.response,
        syntax=form.syntax,
        thinking=asked.thinking,
        let_go=let_go,
    )
