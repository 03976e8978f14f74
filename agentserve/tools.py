"""Python functions as tools of agents: `@agentserve.tool`, and modules of them for `serve --tools`.

A tool's schema is made from its annotations, and arguments are checked against them before the function is
called. Nothing is registered by decorating: whoever serves says which modules' tools there are.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints, overload

import msgspec

USUAL_SECONDS = 60.0
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class BadArguments(ValueError):
    """What the model wrote does not fit the function; one line, which it reads."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that agents may call. Calling it calls the function."""

    name: str
    description: str
    parameters: dict[str, Any]  # JSON schema
    function: Callable[..., Any]
    arguments: type[msgspec.Struct]
    timeout: float  # seconds
    background: bool = False  # the agent goes on without its result, and reads it when it is there

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    def bound(self, arguments: object) -> Callable[[], Any]:
        """The call with these JSON arguments, not yet made. BadArguments."""
        try:
            given = msgspec.convert(arguments, self.arguments, str_keys=True)
        except msgspec.ValidationError as error:
            raise BadArguments(f"{self.name}: {error}") from None
        named = {field: getattr(given, field) for field in given.__struct_fields__}
        return lambda: self.function(**named)


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...


@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float = USUAL_SECONDS,
    background: bool = False,
) -> Callable[[Callable[..., Any]], Tool]: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float = USUAL_SECONDS,
    background: bool = False,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a function a tool: `@tool`, or `@tool(timeout=5)`. Every parameter needs an annotation that
    msgspec can decode; the description is the docstring. `timeout`: seconds that a call may take.

    A coroutine function runs on the server's event loop and is cancelled at its timeout. Any other runs in
    a thread, which nothing can stop: after the timeout its result is dropped. `background`: of tools that
    `agentserve.client` runs; the agent goes on, and reads the result with its next model call.
    """

    def made(given: Callable[..., Any]) -> Tool:
        called = name or given.__name__
        if not _NAME.fullmatch(called):
            raise TypeError(f"{called!r}: a tool's name has 1 to 64 of a-z A-Z 0-9 _ -")
        if not timeout > 0:
            raise TypeError(f"{called}: timeout must be above 0, got {timeout}")
        arguments = _arguments(given, called)
        text = inspect.getdoc(given) or "" if description is None else description
        return Tool(called, text, _schema(arguments), given, arguments, timeout, background)

    return made if function is None else made(function)


def load_tools(modules: Iterable[str]) -> dict[str, Tool]:
    """The tools that modules have among their names, by name. ValueError, in one line."""
    found: dict[str, Tool] = {}
    for module in modules:
        try:
            names = vars(importlib.import_module(module))
        except Exception as error:  # it is somebody's code: anything may come of it
            raise ValueError(f"--tools {module}: {type(error).__name__}: {error}") from error
        tools = [value for value in names.values() if isinstance(value, Tool)]
        if not tools:
            raise ValueError(f"--tools {module}: it has no @agentserve.tool")
        for one in tools:
            if found.setdefault(one.name, one) is not one:
                raise ValueError(f"--tools {module}: there are two tools named {one.name!r}")
    return found


def _arguments(function: Callable[..., Any], name: str) -> type[msgspec.Struct]:
    hints = get_type_hints(function, include_extras=True)
    fields: list[Any] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{name}: {parameter.name} must be a parameter that can be given by name")
        if parameter.name not in hints:
            raise TypeError(f"{name}: {parameter.name} needs an annotation")
        fields.append(
            (parameter.name, hints[parameter.name])
            if parameter.default is parameter.empty
            else (parameter.name, hints[parameter.name], parameter.default)
        )
    try:
        return msgspec.defstruct(f"{name}_arguments", fields, kw_only=True, forbid_unknown_fields=True)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None


def _schema(arguments: type[msgspec.Struct]) -> dict[str, Any]:
    (whole,), parts = msgspec.json.schema_components([arguments])
    schema: dict[str, Any] = dict(parts.pop(arguments.__name__, whole))
    schema.pop("title", None)
    if parts:
        return _at_hand(schema, parts)
    return schema


def _at_hand(schema: dict[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """With the definitions that it refers to."""
    return {**schema, "$defs": dict(parts)}
