"""The structural tag that a client wrote, with the JSON schemas in it rewritten like those of other forms, or
refused by name.

Only xgrammar's own language is known here; what is no schema in it stays as it came.
"""

from __future__ import annotations

from collections.abc import Callable

from tools_bridge.call_syntax import Style
from tools_bridge.holding import Format
from tools_bridge.json_schema import MARKS
from tools_bridge.schemas import GrammarError, check_json

TAG_PLACE = "structural_tag"
_STYLES: dict[object, Style] = {
    "json": "json",
    "qwen_xml": "qwen_xml",
    "glm_xml": "glm_xml",
    "deepseek_xml": "deepseek_xml",
    "deepseek_v4_1_xml": "deepseek_v4_1_xml",
    "kimi_k3_xml": "kimi_k3_xml",
    "gemma": "gemma",
}
_TYPES = (None, "json_schema", "qwen_xml_parameter")  # without one, xgrammar takes it for what it may be
_UNFILTERED = ("pattern", "patternProperties", "minLength", "maxLength")

Holding = Callable[[object, Style, str], Format]
"""(schema, style, place) -> the schema in what xgrammar holds of it."""
Noting = Callable[[str, Format], Format]


def held_tag(tag: Format | None, hold: Holding, noted: Noting, blanks: int) -> Format:
    """The tag's format. `noted`: told the place and the format of each schema. `blanks`: how many may stand
    between JSON tokens where the client has not said it. GrammarError."""
    check_json(tag, TAG_PLACE)
    form = (tag or {}).get("format")
    if not isinstance(form, dict):
        raise GrammarError(f"{TAG_PLACE}: an object with a 'format' is expected")
    writer = _Writer(hold, noted, blanks)
    found = writer.form(form, f"{TAG_PLACE}.format")
    assert isinstance(found, dict)
    return noted(TAG_PLACE, found)


class _Writer:
    def __init__(self, hold: Holding, noted: Noting, blanks: int) -> None:
        self._hold, self._noted, self._blanks = hold, noted, blanks

    def form(self, form: object, where: str) -> object:
        if isinstance(form, list):
            return [self.form(item, f"{where}[{n}]") for n, item in enumerate(form)]
        if not isinstance(form, dict):
            return form
        if "json_schema" in form and form.get("type") in _TYPES:
            return self._schema(form, where)
        return {key: self.form(item, f"{where}.{key}") for key, item in form.items() if key != "json_schema"}

    def _schema(self, form: Format, where: str) -> Format:
        named = "qwen_xml" if form.get("type") == "qwen_xml_parameter" else form.get("style", "json")
        style = _STYLES.get(named) if isinstance(named, str) else None
        if style is None:
            raise GrammarError(f"{where}.style: calls in the style {named!r} cannot be held")
        if form.get("any_order"):
            raise GrammarError(
                f"{where}.any_order: objects whose properties come in any order cannot be held"
            )
        held = self._hold(form["json_schema"], style, f"{where}.json_schema")
        found: Format = {"type": "json_schema", "json_schema": held, "style": style}
        found["max_whitespace_cnt"] = form.get("max_whitespace_cnt", self._blanks)
        marks = [] if style in ("json", "gemma") else list(MARKS[style])  # gemma has its own
        wanted = form.get("excludes", [])
        more = [text for text in wanted if text not in marks] if isinstance(wanted, list) else [wanted]
        if more and (keyword := _unfiltered(held)):
            raise GrammarError(f"{where}.excludes: cannot be held beside {keyword!r} in the schema")
        if marks or more:
            found["excludes"] = [*marks, *more]
        return self._noted(f"{where}.json_schema", found)


def _unfiltered(schema: Format) -> str:
    """A keyword of a text in which xgrammar would exclude nothing, or that it would drop for it; "" if there
    is none."""
    stack: list[object] = [schema]
    while stack:
        part = stack.pop()
        if isinstance(part, list):
            stack += part
        if not isinstance(part, dict):
            continue
        for keyword in _UNFILTERED:
            if keyword in part:
                return keyword
        for key, value in part.items():
            stack += value.values() if key in ("properties", "$defs") else [] if key == "enum" else [value]
    return ""
