"""What the API needs of whoever knows how the model writes: parsers of its answers, and their grammars."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from agentserve.server.http.answer_form import Form
from agentserve.server.sessions.answer import ToolParser
from tools_bridge.call_syntax import CallSyntax
from tools_bridge.reply_request import GrammarRequest


class ParserMaker(Protocol):
    @property
    def written(self) -> CallSyntax:
        """How the model writes calls."""
        ...

    def __call__(self, form: Form, before: str, *, continues: bool = False) -> ToolParser:
        """A parser for one answer of a `form`. `before`: the text that ends its prompt or, where it
        `continues` one, what that begins with."""
        ...

    def reasoning(self, before: str, *, continues: bool = False) -> Reasoning | None:
        """How the model sets reasoning apart in such an answer; None where it has no marks for that."""
        ...


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The marks around it, and whether an answer begins behind the first of them."""

    open: str
    close: str
    inside: bool


class GrammarMaker(Protocol):
    """Compiles forms; thread-safe. A schema it cannot take is a ValueError."""

    def source(self, form: Form, prompt_end: str, owner: str) -> GrammarRequest:
        """What to compile; takes no time. Equal forms of one owner have equal ids. `prompt_end`: the text
        that the answer's prompt ends with, which tells whether reasoning has begun there."""
        ...

    def cached(self, source: GrammarRequest) -> str | None:
        """What was compiled (or, as a ValueError, refused) before. Does not block."""
        ...

    def compile(self, source: GrammarRequest) -> str:
        """Blocks; "" where any text will do. CompilerUnavailable: none can be compiled just now."""
        ...

    def close(self) -> None:
        """Ends what is being compiled, from any thread; soon."""
        ...
