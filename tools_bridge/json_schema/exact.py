"""A client's schema as one that xgrammar holds to the letter.

Whatever the result lets through is valid for the schema. It lets through less where that is what clients
mean, or what can be held:

- objects with `properties` have those alone unless `additionalProperties` says otherwise; their
  `patternProperties` hold the properties that they match and offer none
- without `type` a value is of a type that the other keywords speak of
- of a `oneOf` whose branches overlap, values that tell them apart
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from tools_bridge.json_schema.dialect import ALL_TYPES, TYPES, Part, Schema, is_part, refused, type_of
from tools_bridge.json_schema.facts import Facts, both
from tools_bridge.json_schema.flat import Flattener, TooMuch
from tools_bridge.json_schema.lists import few_values, unlike_lists
from tools_bridge.json_schema.loose import less
from tools_bridge.json_schema.numbers import integer, number
from tools_bridge.json_schema.pruning import NEVER, pruned
from tools_bridge.json_schema.references import References
from tools_bridge.json_schema.texts import countable, name_pattern, string
from tools_bridge.json_schema.values import Judge
from tools_bridge.schemas import GrammarError

MAX_PARTS = 2000  # of the result
_IN_PLACE = {"allOf", "oneOf", "anyOf", "not", "if", "dependentSchemas", "dependencies", "$ref"}


def exact_schema(schema: object, where: str) -> Part:
    """The schema in what xgrammar holds; a GrammarError names what cannot be held, or why nothing is
    valid. `schema` has been through `check_schema`."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not is_part(schema):
        raise GrammarError(f"{where}: a JSON schema must be an object")
    return _Writer(schema, where).all()


def held_schema(schema: Part, where: str) -> tuple[Part, list[str]]:
    """As much of it as can be held: each part that cannot be says less (`loose.less`), and all others what
    they say. And what was left out, with its place."""
    try:
        return exact_schema(schema, where), []
    except TooMuch:
        raise
    except GrammarError:
        pass
    left_out: list[str] = []
    try:
        writer = _Writer(schema, where, tolerant=True)
    except GrammarError as error:  # it is in no draft that is known
        wanted, what = less(schema, error)
        assert is_part(wanted)
        writer = _Writer(wanted, where, tolerant=True)
        left_out.append(f"{where}: {what}")
    return writer.all(), left_out + writer.left_out


class _Writer:
    def __init__(self, root: Part, where: str, *, tolerant: bool = False) -> None:
        self._root, self._where, self._tolerant = root, where, tolerant
        self.left_out: list[str] = []
        self._less: dict[int, tuple[Schema, Schema]] = {}  # id of a part -> itself, what it says then
        self._references = References(root, where)
        self._flattener = Flattener(self._references)
        self._judge = Judge(self._flattener)
        self._names: dict[str, str] = {}  # text of a schema -> its name among the definitions
        self._waiting: list[tuple[str, Schema, str]] = []
        self._parts = 0

    def all(self) -> Part:
        try:
            return self._all()
        except RecursionError:
            raise GrammarError(f"{self._where}: the schema is too deep") from None
        except GrammarError as error:
            if str(error).startswith(self._where):
                raise
            raise GrammarError(f"{self._where}: {error}") from None

    def _all(self) -> Part:
        root = self._schema(self._root, self._where)
        written: dict[str, Part] = {}
        while self._waiting:
            name, schema, where = self._waiting.pop()
            written[name] = self._schema(schema, where)
        root, kept = pruned(root, written, self._where)
        return {**root, "$defs": kept} if kept else root

    def _schema(self, schema: Schema, where: str, *, branch: bool = False) -> Part:
        """`branch`: of alternatives, of which some may have no value."""
        if not self._tolerant:
            return self._said(schema, where)
        _, wanted = self._less.get(id(schema), (schema, schema))
        while True:
            try:
                part = self._said(wanted, where)
                if part != NEVER or branch or wanted is False or wanted in ({"not": {}}, {"not": True}):
                    return part
                error = GrammarError(f"{where}: no value is valid")
            except TooMuch:
                raise
            except GrammarError as refusal:
                error = refusal
            wanted, what = less(wanted, error)
            self._less[id(schema)] = schema, wanted
            self.left_out.append(f"{where}: {what}")

    def _said(self, schema: Schema, where: str) -> Part:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise TooMuch(f"{self._where}: the schema is too complex: more than {MAX_PARTS} parts")
        part = self._flattener.known(schema, where)
        if isinstance(part, bool):
            return {} if part else NEVER
        if part.keys() == {"$ref"}:
            target, name = self._references.target(part["$ref"], where)
            return self._named(name, target, name)
        if part.keys() == {"anyOf"} and isinstance(part["anyOf"], list):
            if not self._tolerant:
                self._flattener.flat(part, where)  # it is checked, and bounded
            places = [f"{where}.anyOf[{n}]" for n in range(len(part["anyOf"]))]
            return _any_of(
                [
                    self._schema(item, place, branch=True)
                    for item, place in zip(part["anyOf"], places, strict=True)
                ]
            )
        return _any_of([self._facts(facts) for facts in self._flattener.flat(part, where)])

    def _part(self, schema: Schema, where: str) -> Part:
        """A schema below another one. One that was put together from references may come again in itself."""
        pure = is_part(schema) and schema.keys() == {"$ref"}
        if is_part(schema) and not pure and schema.keys() & _IN_PLACE:
            text = json.dumps(schema, sort_keys=True)
            if '"$ref"' in text:
                return self._named(text, schema, where)
        return self._schema(schema, where)

    def _named(self, key: str, schema: Schema, where: str) -> Part:
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = f"s{len(self._names)}"
            self._waiting.append((name, schema, where))
        return {"$ref": f"#/$defs/{name}"}

    def _facts(self, facts: Facts) -> Part:
        if facts.values is not None:
            return _enum(self._allowed(facts))
        types = facts.types
        if types == ALL_TYPES and facts.about:
            types = facts.about
        apart = [value for value in facts.apart if type_of(value) in types]
        if apart:
            if not types <= TYPES["boolean"] | TYPES["null"]:
                raise refused(facts.where, "not", "of single values can be held only beside an enum")
            few: list[object] = [True, False] * ("boolean" in types) + [None] * ("null" in types)
            return self._facts(replace(facts, types=types, values=tuple(few)))
        if types == ALL_TYPES:
            return {}
        return _any_of([part for kind in TYPES for part in self._of_type(kind, types, facts)])

    def _of_type(self, kind: str, types: frozenset[str], facts: Facts) -> list[Part]:
        match kind:
            case "integer" if "integer" in types and "fraction" not in types:
                return [integer(facts)]
            case "number" if "fraction" in types:
                if "integer" not in types:
                    raise refused(facts.where, "type", "of numbers that are no integers cannot be held")
                return [number(facts)]
            case "string" if kind in types:
                return [string(facts)]
            case "array" if kind in types:
                return [self._array(facts)]
            case "object" if kind in types:
                return [self._object(facts)]
        return [{"type": kind}] if kind in types and kind in ("null", "boolean") else []

    def _array(self, facts: Facts) -> Part:
        for contains in facts.contains:
            if contains.least > 0 or contains.most is not None:
                raise refused(facts.where, "contains", "cannot be held")
        least, most = facts.min_items, facts.max_items
        if most is not None and most < least:
            return NEVER
        countable(facts.where, minItems=least, maxItems=most)
        if facts.unique and (most is None or most > 1):
            return _enum(unlike_lists(facts, self._listed))
        prefix = [self._part(item, facts.where) for item in facts.prefix[:most]]
        items: Part = {} if facts.items is None else self._part(facts.items, f"{facts.where}.items")
        if facts.items is None and prefix and least <= len(prefix):
            items = NEVER  # as objects are closed that name their properties
        return {"type": "array", "prefixItems": prefix, "items": items, "minItems": least, "maxItems": most}

    def _allowed(self, facts: Facts) -> list[object]:
        """Of the values that are listed."""
        beside = replace(facts, values=None)
        return [value for value in facts.values or () if self._judge.fits(beside, value)]

    def _listed(self, schema: Schema, where: str) -> list[object] | None:
        """All values, where they are few."""
        if schema is None or isinstance(schema, bool):
            return [] if schema is False else None
        found: list[object] = []
        for facts in self._flattener.flat(schema, where):
            values = self._allowed(facts) if facts.values is not None else few_values(facts)
            if values is None:
                return None
            found += values
        return found

    def _object(self, facts: Facts) -> Part:
        where = facts.where
        facts = self._listed_names(facts)
        rest: Schema = facts.additional
        names = list(dict.fromkeys([*facts.properties, *facts.required]))
        properties = {}
        for name in names:
            said = facts.property_of(name)
            if not all(self._judge.allows(schema, name, where) for schema in facts.names):
                said = False
            properties[name] = NEVER if said is False else self._part(said, f"{where}.properties.{name}")
        part: Part = {"type": "object", "properties": properties, "required": list(facts.required)}
        if names:
            if rest is not None and rest is not False and (facts.patterned or facts.names):
                keyword = "patternProperties" if facts.patterned else "propertyNames"
                raise refused(where, keyword, "beside properties and additionalProperties cannot be held")
            part["additionalProperties"] = (
                NEVER if rest is None else self._part(rest, f"{where}.additionalProperties")
            )
        else:
            part |= self._open(facts)
        return part | self._counts(facts, part)

    def _listed_names(self, facts: Facts) -> Facts:
        """Names that are listed are properties."""
        for schema in facts.names:
            for said in self._flattener.flat(schema, facts.where):
                if said.values is not None:
                    listed = [name for name in said.values if isinstance(name, str)]
                    named = {
                        name: facts.property_of(name) for name in dict.fromkeys([*listed, *facts.properties])
                    }
                    return replace(facts, properties=named, additional=False, patterned={})
        return facts

    def _open(self, facts: Facts) -> Part:
        """No property is named."""
        where = facts.where
        rest: Schema = True if facts.additional is None else facts.additional
        patterned = dict(facts.patterned)
        if facts.names:
            name = both(facts.names)
            alternatives = self._flattener.flat(name, f"{where}.propertyNames")
            patterns = [name_pattern(said) for said in alternatives if "string" in said.types]
            if None in patterns:
                pass  # any name
            elif patterned:
                raise refused(where, "propertyNames", "beside patternProperties cannot be held")
            else:
                patterned = {pattern: rest for pattern in patterns if pattern is not None}
                rest = False
                if not patterned:
                    return {"additionalProperties": NEVER}
        if not patterned:
            return {"additionalProperties": self._part(rest, f"{where}.additionalProperties")}
        if facts.additional is not None and facts.additional is not False and rest is not False:
            raise refused(where, "patternProperties", "beside additionalProperties cannot be held")
        written = {
            p.source(where): self._part(said, f"{where}.patternProperties") for p, said in patterned.items()
        }
        if len({json.dumps(said) for said in written.values()}) > 1:
            raise refused(
                where, "patternProperties", "with several patterns cannot be held: a name may match both"
            )
        if len(written) > 1:
            written = {"(" + "|".join(written) + ")": next(iter(written.values()))}
        return {"patternProperties": written, "additionalProperties": NEVER}

    def _counts(self, facts: Facts, part: Part) -> Part:
        least, most = facts.min_properties, facts.max_properties
        countable(facts.where, minProperties=least, maxProperties=most)
        open_ = part["additionalProperties"] != NEVER or "patternProperties" in part
        if open_ and least > max(1, len(facts.required)):
            # A name that is written twice counts once.
            raise refused(
                facts.where, "minProperties", "of more than one cannot be held for names that are not known"
            )
        found: Part = {"minProperties": least} if least > len(facts.required) else {}
        return found if most is None else found | {"maxProperties": most}


def _enum(values: Sequence[object]) -> Part:
    return {"enum": list(values)} if values else NEVER


def _any_of(parts: list[Part]) -> Part:
    flat = [item for part in parts for item in (_branches(part))]
    unique = list({json.dumps(part): part for part in flat}.values())
    if {} in unique:
        return {}
    if not unique:
        return NEVER
    return unique[0] if len(unique) == 1 else {"anyOf": unique}


def _branches(part: Part) -> list[Part]:
    if part == NEVER:
        return []
    found = part.get("anyOf")
    return found if isinstance(found, list) else [part]
