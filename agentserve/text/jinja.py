"""Chat templates run in Jinja2's immutable sandbox, with the helpers `transformers` gives them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Never

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentserve.text.errors import TextError


class _Generation(Extension):
    """`{% generation %}` marks assistant text for training masks; here its body just renders."""

    tags = {"generation"}  # noqa: RUF012 - Jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON for prompts: no HTML escapes, keys in their order, as models were trained."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> Never:
    raise jinja2.TemplateError(str(message))


class CompiledTemplate:
    """One template text, ready to render."""

    def __init__(self, source: str, now: Callable[[], datetime] = datetime.now) -> None:
        """Compile `source`; TextError with the line where it is not valid Jinja2.

        `now` is read by templates that print today's date.
        """
        self.source = source
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TextError(f"chat template, line {error.lineno}: {_one_line(error)}") from None
        except RecursionError:
            raise TextError("chat template: nested too deeply") from None

    def render(self, variables: Mapping[str, object]) -> str:
        """The text; whatever the template does wrong or refuses is a TextError."""
        try:
            return self._template.render(variables)
        except RecursionError:
            raise TextError("chat template: nested too deeply") from None
        except Exception as error:  # templates run arbitrary expressions: any type may come out
            raise TextError(f"chat template: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
