"""Parts of a written schema that no value can ever meet, taken out: what is false, and what needs itself."""

from __future__ import annotations

from collections.abc import Mapping, Set

from tools_bridge.json_schema.dialect import Part
from tools_bridge.schemas import GrammarError

NEVER: Part = {"not": {}}
"""Stands for what has no value, until it is pruned."""

REFERENCE = "#/$defs/"


def pruned(root: Part, defined: Mapping[str, Part], where: str) -> tuple[Part, dict[str, Part]]:
    """The schema and its definitions without what has no value; a GrammarError if nothing is left."""
    met: set[str] = set()
    while found := {name for name in defined.keys() - met if _can_be(defined[name], met)}:
        met |= found
    if not _can_be(root, met):
        raise GrammarError(f"{where}: the schema cannot be met: no value is valid")
    kept: dict[str, Part] = {}
    root = _without(root, met)
    waiting = [root]
    while waiting:
        for name in _mentioned(waiting.pop()):
            if name not in kept:
                kept[name] = _without(defined[name], met)
                waiting.append(kept[name])
    _check_cycles(kept, where)
    return root, kept


def _can_be(part: Part, met: Set[str]) -> bool:
    if part == NEVER:
        return False
    if "$ref" in part:
        return _name(part) in met
    if "anyOf" in part:
        return any(_can_be(branch, met) for branch in _list(part, "anyOf"))
    match part.get("type"):
        case "array":
            prefix, items = _list(part, "prefixItems"), _part(part, "items")
            least = _count(part, "minItems")
            return all(_can_be(item, met) for item in prefix[:least]) and (
                least <= len(prefix) or _can_be(items, met)
            )
        case "object":
            properties = _map(part, "properties")
            if not all(_can_be(properties[name], met) for name in _names(part)):
                return False
            least, most = _count(part, "minProperties"), part.get("maxProperties")
            if isinstance(most, int) and most < max(least, len(_names(part))):
                return False
            return _is_open(part, met) or least <= sum(_can_be(said, met) for said in properties.values())
    return True


def _without(part: Part, met: Set[str]) -> Part:
    if "anyOf" in part:
        branches = [_without(branch, met) for branch in _list(part, "anyOf") if _can_be(branch, met)]
        return branches[0] if len(branches) == 1 else {"anyOf": branches}
    match part.get("type"):
        case "array":
            return _array(part, met)
        case "object":
            return _object(part, met)
    return part


def _array(part: Part, met: Set[str]) -> Part:
    prefix = _list(part, "prefixItems")
    items: Part | None = _part(part, "items")
    most = part["maxItems"]
    for index, item in enumerate(prefix):
        if not _can_be(item, met):
            prefix, items = prefix[:index], None
            break
    if items is not None and not _can_be(items, met):
        items = None
    if most is not None and isinstance(most, int) and most <= len(prefix):
        prefix, items = prefix[:most], None
    if not prefix and items is None:
        return {"enum": [[]]}
    least = _count(part, "minItems")
    found: Part = {"type": "array"}
    if prefix:
        found["prefixItems"] = [_without(item, met) for item in prefix]
    found["items"] = False if items is None else _without(items, met)
    if least:
        found["minItems"] = least
    return found if most is None or items is None else found | {"maxItems": most}


def _object(part: Part, met: Set[str]) -> Part:
    properties = {
        name: _without(said, met) for name, said in _map(part, "properties").items() if _can_be(said, met)
    }
    found: Part = {"type": "object"}
    rest = _part(part, "additionalProperties") if _is_open(part, met) else NEVER
    patterned = {
        pattern: _without(said, met)
        for pattern, said in _map(part, "patternProperties").items()
        if _can_be(said, met) and _is_open(part, met)
    }
    if properties or (not patterned and rest == NEVER):
        found["properties"] = properties
    if _names(part):
        found["required"] = _names(part)
    if patterned:
        found["patternProperties"] = patterned
    found["additionalProperties"] = _without(rest, met) if _can_be(rest, met) else False
    for keyword in ("minProperties", "maxProperties"):
        if keyword in part:
            found[keyword] = part[keyword]
    if found == {"type": "object", "additionalProperties": {}}:
        return {"type": "object"}
    return found


def _is_open(part: Part, met: Set[str]) -> bool:
    """It may have properties that it does not name. Not where one that it names can have no value: what is
    left out could not be told from names that are free."""
    if not all(_can_be(said, met) for said in _map(part, "properties").values()):
        return False
    patterned = _map(part, "patternProperties").values()
    return _can_be(_part(part, "additionalProperties"), met) or any(_can_be(said, met) for said in patterned)


def _check_cycles(defined: Mapping[str, Part], where: str) -> None:
    """A definition that is itself, or one of its own alternatives, says nothing."""
    for name in defined:
        seen: set[str] = set()
        waiting = _in_place(defined[name])
        while waiting:
            other = waiting.pop()
            if other == name:
                raise GrammarError(
                    f"{where}: Circular $ref: a schema refers to itself without anything between"
                )
            if other not in seen:
                seen.add(other)
                waiting += _in_place(defined[other])


def _in_place(part: Part) -> list[str]:
    if "$ref" in part:
        return [_name(part)]
    return [name for branch in _list(part, "anyOf") for name in _in_place(branch)]


def _mentioned(part: Part) -> list[str]:
    found: list[str] = []
    stack: list[object] = [part]
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack += item
        elif isinstance(item, dict):
            if isinstance(item.get("$ref"), str):
                found.append(_name(item))
            else:
                stack += [value for key, value in item.items() if key != "enum"]
    return found


def _name(part: Part) -> str:
    return str(part["$ref"]).removeprefix(REFERENCE)


def _list(part: Part, keyword: str) -> list[Part]:
    found = part.get(keyword)
    return found if isinstance(found, list) else []


def _map(part: Part, keyword: str) -> dict[str, Part]:
    found = part.get(keyword)
    return found if isinstance(found, dict) else {}


def _part(part: Part, keyword: str) -> Part:
    found = part.get(keyword)
    return found if isinstance(found, dict) else NEVER


def _names(part: Part) -> list[str]:
    found = part.get("required")
    return found if isinstance(found, list) else []


def _count(part: Part, keyword: str) -> int:
    found = part.get(keyword)
    return found if isinstance(found, int) else 0
