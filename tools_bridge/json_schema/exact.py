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
import math
from dataclasses import replace

from tools_bridge.json_schema import formats
from tools_bridge.json_schema.dialect import Part, Schema, is_part, refused
from tools_bridge.json_schema.facts import ALL_TYPES, TYPES, Bound, Facts, Number, both, type_of
from tools_bridge.json_schema.flat import Flattener
from tools_bridge.json_schema.pattern_tree import ANY, Repeat
from tools_bridge.json_schema.patterns import Pattern, read_pattern
from tools_bridge.json_schema.pruning import NEVER, pruned
from tools_bridge.json_schema.references import References
from tools_bridge.json_schema.values import Judge
from tools_bridge.schemas import MAX_ENUM, GrammarError

MAX_PARTS = 2000  # of the result
MAX_COUNT = 10_000  # characters, items, properties that are counted
MAX_INTEGER = 2**53
_IN_PLACE = {"allOf", "oneOf", "anyOf", "not", "if", "dependentSchemas", "dependencies", "$ref"}


def exact_schema(schema: object, where: str) -> Part:
    """The schema in what xgrammar holds; a GrammarError names what cannot be held, or why nothing is
    valid. `schema` has been through `check_schema`."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not is_part(schema):
        raise GrammarError(f"{where}: a JSON schema must be an object")
    try:
        return _Writer(schema, where).all()
    except RecursionError:
        raise GrammarError(f"{where}: the schema is too deep") from None
    except GrammarError as error:
        if str(error).startswith(where):
            raise
        raise GrammarError(f"{where}: {error}") from None


class _Writer:
    def __init__(self, root: Part, where: str) -> None:
        self._root, self._where = root, where
        self._references = References(root, where)
        self._flattener = Flattener(self._references)
        self._judge = Judge(self._flattener)
        self._names: dict[str, str] = {}  # text of a schema -> its name among the definitions
        self._waiting: list[tuple[str, Schema, str]] = []
        self._parts = 0

    def all(self) -> Part:
        root = self._schema(self._root, self._where)
        written: dict[str, Part] = {}
        while self._waiting:
            name, schema, where = self._waiting.pop()
            written[name] = self._schema(schema, where)
        root, kept = pruned(root, written, self._where)
        return {**root, "$defs": kept} if kept else root

    def _schema(self, schema: Schema, where: str) -> Part:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise GrammarError(f"{self._where}: the schema is too complex: more than {MAX_PARTS} parts")
        part = self._flattener.known(schema, where)
        if isinstance(part, bool):
            return {} if part else NEVER
        if part.keys() == {"$ref"}:
            target, name = self._references.target(part["$ref"], where)
            return self._named(name, target, name)
        if part.keys() == {"anyOf"} and isinstance(part["anyOf"], list):
            self._flattener.flat(part, where)  # it is checked, and bounded
            return _any_of(
                [self._schema(item, f"{where}.anyOf[{n}]") for n, item in enumerate(part["anyOf"])]
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
            beside = replace(facts, values=None)
            allowed = [value for value in facts.values if self._judge.fits(beside, value)]
            return {"enum": allowed} if allowed else NEVER
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
                return [_integer(facts)]
            case "number" if "fraction" in types:
                if "integer" not in types:
                    raise refused(facts.where, "type", "of numbers that are no integers cannot be held")
                return [_number(facts)]
            case "string" if kind in types:
                return [_string(facts)]
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
        if facts.unique and (most is None or most > 1):
            raise refused(facts.where, "uniqueItems", "cannot be held")
        if most is not None and most < least:
            return NEVER
        _countable(facts.where, minItems=least, maxItems=most)
        prefix = [self._part(item, facts.where) for item in facts.prefix[:most]]
        items: Part = {} if facts.items is None else self._part(facts.items, f"{facts.where}.items")
        if facts.items is None and prefix and least <= len(prefix):
            items = NEVER  # as objects are closed that name their properties
        return {"type": "array", "prefixItems": prefix, "items": items, "minItems": least, "maxItems": most}

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
            patterns = [_name_pattern(said) for said in alternatives if "string" in said.types]
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
        _countable(facts.where, minProperties=least, maxProperties=most)
        open_ = part["additionalProperties"] != NEVER or "patternProperties" in part
        if open_ and least > max(1, len(facts.required)):
            # A name that is written twice counts once.
            raise refused(
                facts.where, "minProperties", "of more than one cannot be held for names that are not known"
            )
        found: Part = {"minProperties": least} if least > len(facts.required) else {}
        return found if most is None else found | {"maxProperties": most}


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


def _integer(facts: Facts) -> Part:
    low, high = _least_integer(facts.low), _most_integer(facts.high)
    for multiple in facts.multiples:
        if not isinstance(multiple, int):
            raise refused(facts.where, "multipleOf", "of a number that is no integer cannot be held")
    if low is not None and high is not None and low > high:
        return NEVER
    step = math.lcm(*(int(multiple) for multiple in facts.multiples))
    if step > 1:
        if low is None or high is None or (high - low) // step > MAX_ENUM:
            raise refused(
                facts.where, "multipleOf", f"can be held within bounds only, of {MAX_ENUM} values at most"
            )
        values = list(range(-(-low // step) * step, high + 1, step))
        return {"enum": values} if values else NEVER
    for keyword, bound in (("minimum", low), ("maximum", high)):
        if bound is not None and abs(bound) > MAX_INTEGER:
            raise refused(facts.where, keyword, f"beyond {MAX_INTEGER} cannot be held")
    bounds = {"minimum": low, "maximum": high}
    return {"type": "integer"} | {key: value for key, value in bounds.items() if value is not None}


def _least_integer(bound: Bound | None) -> int | None:
    if bound is None:
        return None
    return math.floor(bound.value) + 1 if bound.open else math.ceil(bound.value)


def _most_integer(bound: Bound | None) -> int | None:
    if bound is None:
        return None
    return math.ceil(bound.value) - 1 if bound.open else math.floor(bound.value)


def _number(facts: Facts) -> Part:
    if facts.multiples:
        if all(multiple == 1 for multiple in facts.multiples):
            return _integer(facts)
        raise refused(facts.where, "multipleOf", "of type 'number' cannot be held")
    found: Part = {"type": "number"}
    for bound, closed, exclusive in (
        (facts.low, "minimum", "exclusiveMinimum"),
        (facts.high, "maximum", "exclusiveMaximum"),
    ):
        if bound is not None:
            _check_places(bound.value, facts.where, exclusive if bound.open else closed)
            found[exclusive if bound.open else closed] = bound.value
    if facts.low and facts.high:
        low, high = facts.low, facts.high
        if low.value > high.value or (low.value == high.value and (low.open or high.open)):
            return NEVER
    return found


def _check_places(value: Number, where: str, keyword: str) -> None:
    """xgrammar writes bounded numbers with six decimal places."""
    if abs(value) > MAX_INTEGER or round(value, 5) != value:
        raise refused(
            where, keyword, f"of {value!r} cannot be held: it is too large or has more than 5 decimal places"
        )


def _string(facts: Facts) -> Part:
    least, most = facts.min_length, facts.max_length
    if most is not None and most < least:
        return NEVER
    pattern = _text_pattern(facts)
    if pattern is not None:
        return {"type": "string", "pattern": pattern.source(facts.where)}
    _countable(facts.where, minLength=least, maxLength=most)
    found: Part = {"type": "string"}
    if least:
        found["minLength"] = least
    return found if most is None else found | {"maxLength": most}


def _text_pattern(facts: Facts) -> Pattern | None:
    """What a text is held to, its length too; None where its length is all."""
    patterns = list(facts.patterns)
    for form in facts.formats:
        if form in formats.UNHELD:
            raise refused(facts.where, "format", f"{form!r} cannot be held")
        if form in formats.PATTERNS:
            patterns.append(read_pattern(f"^{formats.PATTERNS[form]}$", facts.where, ours=True))
    if len(patterns) > 1:
        raise refused(facts.where, "pattern", "beside another pattern or a format cannot be held")
    if not patterns:
        return None
    counted = patterns[0].of_length(facts.min_length, facts.max_length)
    if counted is None:
        keyword = "pattern" if facts.patterns else "format"
        raise refused(facts.where, keyword, "and a length cannot be held together")
    return counted


def _name_pattern(facts: Facts) -> Pattern | None:
    """What a property's name is held to; None: nothing."""
    where, least, most = facts.where, facts.min_length, facts.max_length
    apart = [name for name in facts.apart if isinstance(name, str)]
    if "" in apart:
        least = max(least, 1)
    _countable(where, minLength=least, maxLength=most)
    pattern = _text_pattern(replace(facts, min_length=least))
    if pattern is None and (least or most is not None):
        pattern = Pattern("", Repeat(ANY, least, most))
    if any(pattern is None or pattern.found_in(name) for name in apart):
        raise refused(where, "propertyNames", "without single names cannot be held")
    return pattern


def _countable(where: str, **counts: int | None) -> None:
    for keyword, count in counts.items():
        if count is not None and count > MAX_COUNT:
            raise refused(where, keyword, f"of {count} is more than can be counted, {MAX_COUNT}")
