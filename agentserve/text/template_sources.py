"""Where a model keeps its chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentserve.text.errors import TextError
from agentserve.text.gguf_metadata import Metadata
from agentserve.text.json_files import objects, read_object, read_text

_DEFAULT = "default"
_TOOL_USE = "tool_use"
_MAX_TEMPLATE = 4 << 20  # bytes; long ones have some 20 KB


@dataclass(frozen=True, slots=True)
class TemplateSources:
    """`default` is for chats; `tool_use`, where a model has one, for chats with tools."""

    default: str | None = None
    tool_use: str | None = None


def from_file(path: Path) -> TemplateSources:
    """A template the operator names."""
    return TemplateSources(_read(path))


def from_folder(folder: Path) -> TemplateSources:
    """`chat_template.jinja` (and its additional ones), else what `tokenizer_config.json` holds."""
    named: dict[str, str] = {}
    value = read_object(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(value, str):
        named[_DEFAULT] = value
    elif value is not None:
        for entry in objects(value, "tokenizer_config.json: chat_template"):
            name, template = entry.get("name"), entry.get("template")
            if isinstance(name, str) and isinstance(template, str):
                named[name] = template
    single = folder / "chat_template.jinja"
    if single.is_file():
        named[_DEFAULT] = _read(single)
    extra = folder / "additional_chat_templates" / f"{_TOOL_USE}.jinja"
    if extra.is_file():
        named[_TOOL_USE] = _read(extra)
    return _choose(named)


def from_metadata(metadata: Metadata) -> TemplateSources:
    """`tokenizer.chat_template` and `tokenizer.chat_template.<name>` of a GGUF file."""
    key = "tokenizer.chat_template"
    named = {
        _DEFAULT if name == key else name.removeprefix(f"{key}."): value
        for name, value in metadata.items()
        if (name == key or name.startswith(f"{key}.")) and isinstance(value, str)
    }
    return _choose(named)


def _read(path: Path) -> str:
    try:
        return read_text(path, _MAX_TEMPLATE)
    except TextError as error:
        raise TextError(f"chat template {error}") from None
    except OSError as error:
        raise TextError(f"chat template {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise TextError(f"chat template {path}: not UTF-8 text") from None


def _choose(named: Mapping[str, str]) -> TemplateSources:
    tool_use = named.get(_TOOL_USE)
    return TemplateSources(named.get(_DEFAULT, tool_use), tool_use)
