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
    living = Living(met)
    known = -1
    while known < len(met):  # the last round adds nothing, so what it has seen stays true
        known, living = len(met), Living(met)
        for name in reversed(list(defined)):  # what it needs is mostly further back
            if name not in met and living.can_be(defined[name]):
                met.add(name)
    if not living.can_be(root):
        raise GrammarError(f"{where}: the schema cannot be met: no value is valid")
    kept: dict[str, Part] = {}
    root = living.kept(root)
    waiting = [root]
    while waiting:
        for name in _mentioned(waiting.pop()):
            if name not in kept:
                kept[name] = as_definition(living.kept(defined[name]))
                waiting.append(kept[name])
    _check_cycles(kept, where)
    return root, kept


def as_definition(part: Part) -> Part:
    """xgrammar 0.2.9 takes any object that is referred to for the empty one."""
    return {"type": "object", "additionalProperties": {}} if part == {"type": "object"} else part


class Living:
    """Which parts can have a value, if the definitions in `met` can. Each part is looked at once."""

    def __init__(self, met: Set[str]) -> None:
        self._met = met
        self._seen: dict[int, bool] = {}  # by the part's id: parts live as long as the schema

    def can_be(self, part: Part) -> bool:
        found = self._seen.get(id(part))
        if found is None:
            found = self._seen[id(part)] = self._looked(part)
        return found

    def _looked(self, part: Part) -> bool:
        if part == NEVER:
            return False
        if "$ref" in part:
            return _name(part) in self._met
        if "anyOf" in part:
            return any(self.can_be(branch) for branch in _list(part, "anyOf"))
        match part.get("type"):
            case "array":
                prefix, items = _list(part, "prefixItems"), _part(part, "items")
                least = _count(part, "minItems")
                return all(self.can_be(item) for item in prefix[:least]) and (
                    least <= len(prefix) or self.can_be(items)
                )
            case "object":
                properties = _map(part, "properties")
                if not all(self.can_be(properties[name]) for name in _names(part)):
                    return False
                least, most = _count(part, "minProperties"), part.get("maxProperties")
                if isinstance(most, int) and most < max(least, len(_names(part))):
                    return False
                return self._is_open(part) or least <= sum(self.can_be(said) for said in properties.values())
        return True

    def kept(self, part: Part) -> Part:
        if "anyOf" in part:
            branches = [self.kept(branch) for branch in _list(part, "anyOf") if self.can_be(branch)]
            return branches[0] if len(branches) == 1 else {"anyOf": branches}
        match part.get("type"):
            case "array":
                return self._array(part)
            case "object":
                return self._object(part)
        return part

    def _array(self, part: Part) -> Part:
        prefix = _list(part, "prefixItems")
        items: Part | None = _part(part, "items")
        most = part["maxItems"]
        for index, item in enumerate(prefix):
            if not self.can_be(item):
                prefix, items = prefix[:index], None
                break
        if items is not None and not self.can_be(items):
            items = None
        if most is not None and isinstance(most, int) and most <= len(prefix):
            prefix, items = prefix[:most], None
        if not prefix and items is None:
            return {"enum": [[]]}
        least = _count(part, "minItems")
        found: Part = {"type": "array"}
        if prefix:
            found["prefixItems"] = [self.kept(item) for item in prefix]
        found["items"] = False if items is None else self.kept(items)
        if least:
            found["minItems"] = least
        return found if most is None or items is None else found | {"maxItems": most}

    def _object(self, part: Part) -> Part:
        properties = {
            name: self.kept(said) for name, said in _map(part, "properties").items() if self.can_be(said)
        }
        found: Part = {"type": "object"}
        open_ = self._is_open(part)
        rest = _part(part, "additionalProperties") if open_ else NEVER
        patterned = {
            pattern: self.kept(said)
            for pattern, said in _map(part, "patternProperties").items()
            if open_ and self.can_be(said)
        }
        if properties or (not patterned and rest == NEVER):
            found["properties"] = properties
        if _names(part):
            found["required"] = _names(part)
        if patterned:
            found["patternProperties"] = patterned
        found["additionalProperties"] = self.kept(rest) if self.can_be(rest) else False
        for keyword in ("minProperties", "maxProperties"):
            if keyword in part:
                found[keyword] = part[keyword]
        if found == {"type": "object", "additionalProperties": {}}:
            return {"type": "object"}
        return found

    def _is_open(self, part: Part) -> bool:
        """It may have properties that it does not name. Not where one that it names can have no value: what
        is left out could not be told from names that are free."""
        if not all(self.can_be(said) for said in _map(part, "properties").values()):
            return False
        patterned = _map(part, "patternProperties").values()
        return self.can_be(_part(part, "additionalProperties")) or any(
            self.can_be(said) for said in patterned
        )


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
    stack = [part]
    while stack:
        item = stack.pop()
        if "$ref" in item:
            found.append(_name(item))
            continue
        for keyword in ("anyOf", "prefixItems"):
            stack += _list(item, keyword)
        for keyword in ("properties", "patternProperties"):
            stack += _map(item, keyword).values()
        stack += [_part(item, key) for key in ("items", "additionalProperties") if key in item]
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
