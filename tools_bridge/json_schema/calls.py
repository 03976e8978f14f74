"""A tool's parameters for calls that are not written as JSON: what such a form cannot say is left out or
refused, so that what its parser reads is valid."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from tools_bridge.json_schema.chars import CONTROLS, Ranges
from tools_bridge.json_schema.dialect import Part, written_type
from tools_bridge.json_schema.facts import canonical
from tools_bridge.json_schema.pattern_tree import ANY, Repeat
from tools_bridge.json_schema.patterns import Pattern, read_pattern
from tools_bridge.json_schema.pruning import REFERENCE, as_definition
from tools_bridge.schemas import GrammarError

Reading = Callable[[str, str], object]
"""(argument, text) -> the value that the parser makes of a text that stands as it is."""

MARKS: dict[str, tuple[str, ...]] = {
    "qwen_xml": ("</parameter>", "<parameter=", "</function>", "</tool_call>"),
    "glm_xml": ("</arg_value>", "</tool_call>"),
    "deepseek_xml": ("</｜DSML｜",),
    "deepseek_v4_1_xml": ("</｜DSML｜",),
    "kimi_k3_xml": ("<|open|>", "<|close|>"),
    "gemma": ('<|"|>',),
}
"""What no string of a call may have in it, by style: parsers take it for the end of a value."""

MAX_TEXT = 256  # characters of a text whose length is held by a pattern
APART: Ranges = (*CONTROLS, (60, 60))  # every mark that ends a value begins with <; line ends may be cut off
_NAME = re.compile(r"[^\s<>\"&\x00-\x1f]([^<>\"&\x00-\x1f]*[^\s<>\"&\x00-\x1f])?")
_GEMMA_NAME = re.compile(r"\w[\w.$-]*")
_BARE: list[Part] = [{}, {"type": "array", "items": {}}]
_BARE += [{"type": kind} for kind in ("null", "boolean", "integer", "number", "object")]


def call_schema(
    schema: Part, style: str, where: str, read: Reading, left_out: list[str] | None = None
) -> Part:
    """`schema`: an exact one, of an object. With `left_out`, arguments that the form cannot hold are held to
    their types, and listed there."""
    return _Form(schema, style, where, read, left_out).all()


class _Form:
    def __init__(self, root: Part, style: str, where: str, read: Reading, left_out: list[str] | None) -> None:
        defined = root.get("$defs")
        self._defined: dict[str, Part] = defined if isinstance(defined, dict) else {}
        self._root, self._style, self._where, self._read = root, style, where, read
        self._marks = MARKS[style]
        self._left_out = left_out

    def all(self) -> Part:
        root = dict(self._resolved(self._root))
        if root.get("type") != "object" or "patternProperties" in root:
            raise self._no("alternatives or patterns of names", self._where)
        properties, rest = root.get("properties"), root.get("additionalProperties")
        if isinstance(properties, dict) and properties:
            if self._style != "gemma":  # nothing keeps their names apart from those that are known
                root["additionalProperties"] = False
            root["properties"] = {name: self._argument(name, part) for name, part in properties.items()}
        elif isinstance(rest, dict):
            root["additionalProperties"] = self._argument("", rest)
        root = self._within(root)
        defined = {name: as_definition(self._definition(part)) for name, part in self._defined.items()}
        return {**root, "$defs": defined} if defined else root

    def _argument(self, name: str, part: Part) -> Part:
        def written(part: Part) -> Part:
            return part if self._style == "gemma" else self._value(name, part)

        if self._left_out is None:
            return written(part)
        for wanted in (part, self._bare(part)):
            try:
                found = written(wanted)
                self._within(found)
            except GrammarError:
                continue
            if wanted is not part:
                self._left_out.append(f"{self._where}.properties.{name}: all but its type")
            return found
        self._left_out.append(f"{self._where}.properties.{name}: all")
        return written({})

    def _definition(self, part: Part) -> Part:
        try:
            return self._within(part)
        except GrammarError:
            if self._left_out is None:
                raise
        self._left_out.append(f"{self._where}.$defs: all but a type")
        return self._bare(part)

    def _bare(self, part: Part) -> Part:
        """Its types alone."""
        branches = [{"type": _kind(self._resolved(branch))} for branch in self._branches(part)]
        unique = list({str(branch): branch for branch in branches}.values())
        if any(branch["type"] in ("any", "reference") for branch in unique):
            return {}
        found: list[Part] = [{"type": branch["type"]} for branch in unique]
        return found[0] if len(found) == 1 else {"anyOf": found}

    def _value(self, name: str, part: Part) -> Part:
        """An argument, which stands as it is if it is a string."""
        where = f"{self._where}.properties.{name}"
        if name and not _NAME.fullmatch(name):
            raise self._no("this property's name", where)
        branches = self._branches(part)
        if self._style == "kimi_k3_xml":  # any name of a type may stand before any alternative
            kind = _kind(branches[0] if branches[0] != {"type": "null"} else branches[-1])
            branches = [branch for branch in branches if _kind(branch) == kind]
            branches = [{"type": kind, **branch} if "enum" in branch else branch for branch in branches]
            if len(branches) > 1:
                raise self._no("alternatives of one type", where)
        if self._style in ("qwen_xml", "glm_xml"):
            self._check_read(name, branches, where)
        for branch in branches:
            if any(isinstance(value, str) and value.strip() != value for value in _list(branch.get("enum"))):
                raise self._no("these listed values", where)
        return branches[0] if len(branches) == 1 else {"anyOf": branches}

    def _branches(self, part: Part) -> list[Part]:
        """Alternatives, each of one type."""
        part = self._resolved(part, deep=self._style == "kimi_k3_xml")
        if "anyOf" in part:
            return [found for branch in _list(part["anyOf"]) for found in self._branches(branch)]
        if "enum" not in part:
            return [part]
        kinds: dict[str, list[object]] = {}
        for value in _list(part["enum"]):
            kinds.setdefault(_kind({"enum": [value]}), []).append(value)
        return [{"enum": values} for values in kinds.values()]

    def _check_read(self, name: str, branches: list[Part], where: str) -> None:
        """What stands without quotes is read by the schema: it must come to something valid."""
        texts = [branch for branch in branches if _kind(branch) == "string"]
        others = [branch for branch in branches if _kind(branch) != "string"]
        listed = [value for branch in branches for value in _list(branch.get("enum"))]
        for branch in texts:
            if "enum" in branch:
                known = set(map(canonical, listed))
                if any(
                    canonical(self._read(name, str(value))) not in known for value in _list(branch["enum"])
                ):
                    raise self._no("these listed values", where)
            elif any(other not in _BARE for other in others):
                raise self._no("strings beside other values that are bounded", where)
            elif not others and self._read(name, "1") != "1":
                raise self._no("strings without 'type'", where)

    def _pattern(self, part: Part, where: str, apart: Ranges) -> Part:
        if "pattern" in part:
            pattern = read_pattern(f"^({part['pattern']})$", where, ours=True)
        elif "minLength" in part or "maxLength" in part:
            least, most = part.get("minLength", 0), part.get("maxLength")
            assert isinstance(least, int)
            assert most is None or isinstance(most, int)
            if max(least, most or 0) > MAX_TEXT:
                raise self._no(f"a string's length beyond {MAX_TEXT}", where)
            pattern = Pattern("", Repeat(ANY, least, most))
        else:
            return part
        return {"type": "string", "pattern": pattern.source(where, apart)}

    def _within(self, part: Part) -> Part:
        """At every level: strings without marks, and names that can be written."""
        found: Part = {}
        for key, value in part.items():
            if key in ("enum", "$defs"):
                continue
            if key in ("anyOf", "prefixItems"):
                found[key] = [self._within(item) for item in _list(value)]
            elif key in ("properties", "patternProperties") and isinstance(value, dict):
                self._check_names(key, value)
                found[key] = {self._name(key, name): self._within(item) for name, item in value.items()}
            elif isinstance(value, dict):
                found[key] = self._within(value)
            else:
                found[key] = value
        if "enum" in part:
            text = json.dumps(part["enum"], ensure_ascii=False).replace('\\"', '"')
            if any(mark in text for mark in self._marks):
                raise self._no("these listed values", self._where)
            found["enum"] = part["enum"]
        elif found.get("type") == "string":
            return self._pattern(found, self._where, APART)
        return found

    def _name(self, key: str, name: str) -> str:
        """A pattern's names have no marks either."""
        if key == "properties":
            return name
        return str(self._pattern({"pattern": name}, self._where, APART)["pattern"])

    def _check_names(self, key: str, named: Part) -> None:
        if self._style != "gemma":
            if key == "properties" and any("<" in name for name in named):
                raise self._no("a property's name with '<'", self._where)
        elif key == "patternProperties" or not all(map(_GEMMA_NAME.fullmatch, named)):
            raise self._no("names of properties that are no plain words", self._where)

    def _resolved(self, part: Part, *, deep: bool = True) -> Part:
        """What a reference names; one to an object or a list stays if not `deep`."""
        found = part
        for _ in range(len(self._defined) + 1):
            name = found.get("$ref")
            if not isinstance(name, str):
                break
            found = self._defined[name.removeprefix(REFERENCE)]
        return part if not deep and found.get("type") in ("object", "array") else found

    def _no(self, what: str, where: str) -> GrammarError:
        return GrammarError(f"{where}: {what} cannot be held in the form in which this model writes calls")


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _kind(part: Part) -> str:
    values = part.get("enum")
    if isinstance(values, list) and values:
        kind = written_type(values[0])
        return "number" if kind == "integer" else kind
    return str(part.get("type", "reference" if "$ref" in part else "any"))
