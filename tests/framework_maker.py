# ruff: noqa: PLW0108 - a value is made when it is asked for, and others then than before
"""Schemas as pydantic 2, zod 4 and OpenAI's strict mode write them, by seed, each with values it allows."""

import random

from tests.framework_samples import BIG, FORMATS, NAMES, PATTERNS, TAGS, TEXTS


class Maker:
    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.strict = self.rng.random() < 0.3  # OpenAI's
        self.zod = self.rng.random() < 0.5
        self.defs = {}
        self.makes = {}
        self.names_left = [f"M{n}" for n in range(self.rng.choice([0, 0, 1, 2, 4]))]

    def document(self):
        """(schema, value maker)"""
        schema, make = self.object(0) if self.strict or self.rng.random() < 0.7 else self.schema(0)
        while self.names_left:  # definitions that nobody came to
            self.reference(0)
        if self.defs:
            schema = {**schema, "$defs": dict(self.defs)}
        if self.zod:
            schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
        return schema, make

    def schema(self, depth):
        rng = self.rng
        kinds = [self.string] * 4 + [
            self.integer,
            self.number,
            self.boolean,
            self.enum,
            self.literal,
            self.nullable,
            self.any,
        ]
        if depth < 4:
            kinds += [
                self.object,
                self.object,
                self.array,
                self.array,
                self.union,
                self.tagged,
                self.reference,
                self.reference,
                self.tuple,
                self.record,
                self.merged,
            ]
        schema, make = rng.choice(kinds)(depth)
        if rng.random() < 0.3 and (not self.strict or "$ref" not in schema):
            schema = self.annotated(schema)
        return schema, make

    def annotated(self, schema):
        rng = self.rng
        more = {
            "title": "T t",
            "description": 'de"s\n',
            "examples": [1, {"$ref": "x"}],
            "default": None,
            "deprecated": True,
            "readOnly": True,
            "x-order": 3,
            "discriminator": {"propertyName": "k"},
        }
        return {**schema, **dict(rng.sample(sorted(more.items(), key=str), rng.randint(1, 3)))}

    def string(self, depth):
        rng = self.rng
        kind = rng.random()
        if kind < 0.35:
            low = rng.choice([None, None, 0, 1, 2])
            high = rng.choice([None, None, 1, 3, 8, 60])
            if low is not None and high is not None and high < low:
                high = low
            found = {"type": "string"}
            if low is not None:
                found["minLength"] = low
            if high is not None:
                found["maxLength"] = high
            plain = [t for t in TEXTS if high is None or not set(t) & set('"\\\n\t')]
            fits = [t for t in plain if len(t) >= (low or 0) and (high is None or len(t) <= high)] or [
                "x" * (low or 0)
            ]
            return found, lambda d: rng.choice(fits)
        if kind < 0.6:
            pattern = rng.choice(list(PATTERNS))
            return {"type": "string", "pattern": pattern}, lambda d: rng.choice(PATTERNS[pattern])
        if kind < 0.85:
            form = rng.choice(list(FORMATS))
            return {"type": "string", "format": form}, lambda d: rng.choice(FORMATS[form])
        return {"type": "string"}, lambda d: rng.choice(TEXTS)

    def integer(self, depth):
        rng = self.rng
        low, high = rng.choice(
            [
                (None, None),
                (0, None),
                (None, 10),
                (1, 5),
                (-BIG, BIG),
                (0, 255),
                (-40, -3),
                (0, 2**63 - 1),
                (-128, 127),
                (100, 99999),
                (7, 7),
            ]
        )
        found = {"type": "integer"}
        if low is not None:
            if rng.random() < 0.3:
                found["exclusiveMinimum"] = low - 1
            else:
                found["minimum"] = low
        if high is not None:
            if rng.random() < 0.3:
                found["exclusiveMaximum"] = high + 1
            else:
                found["maximum"] = high
        a, b = (-1000 if low is None else low), (1000 if high is None else high)
        if low is not None and high is None:
            b = low + 100000
        if high is not None and low is None:
            a = high - 100000
        b = min(b, BIG)
        return found, lambda d: rng.choice([a, b, rng.randint(a, b), rng.randint(a, b)])

    def number(self, depth):
        rng = self.rng
        low, high = rng.choice(
            [
                (None, None),
                (0, None),
                (0, 1),
                (-1.5, 2.5),
                (None, 100),
                (0.1, 0.9),
                (-90, 90),
                (-180.0, 180.0),
                (1e-7, None),
            ]
        )
        found = {"type": "number"}
        ends = []
        if low is not None:
            if rng.random() < 0.4:
                found["exclusiveMinimum"] = low
            else:
                found["minimum"] = low
                ends += [low] if round(low, 5) == low else []
        if high is not None:
            if rng.random() < 0.4:
                found["exclusiveMaximum"] = high
            else:
                found["maximum"] = high
                ends += [high]
        a = low if low is not None else (high or 0) - 500
        b = high if high is not None else (low or 0) + 500

        def make(d):
            if ends and rng.random() < 0.2:
                return rng.choice(ends)
            for _ in range(20):
                value = round(rng.uniform(a, b), rng.choice([1, 2, 5]))
                if (low is None or value > low) and (high is None or value < high):
                    return int(value) if value == int(value) and rng.random() < 0.5 else value
            return round((a + b) / 2, 5)

        return found, make

    def boolean(self, depth):
        return {"type": "boolean"}, lambda d: self.rng.random() < 0.5

    def any(self, depth):
        values = [None, 1, "x", [], [1, {"a": None}], {"b": [True]}, 1.5]
        return {}, lambda d: self.rng.choice(values)

    def enum(self, depth):
        rng = self.rng
        values = rng.sample(["r", "g", "b", "two words", 'q"', "é", "null", ""], rng.randint(1, 4))
        typed = {"type": "string"}
        if not self.strict and rng.random() < 0.3:
            values = rng.sample([1, 2, "1", None, True, 2.5], rng.randint(1, 4))
            typed = {}
        if rng.random() < 0.2:
            values = rng.sample([1, 2, 3], rng.randint(1, 3))
            typed = {"type": "integer"}
        return {**typed, "enum": values}, lambda d: rng.choice(values)

    def literal(self, depth):
        value = self.rng.choice(["a", "b c", 1, True, None])
        kinds = {str: "string", int: "integer", bool: "boolean", type(None): "null"}
        typed = {"type": kinds[type(value)]} if self.rng.random() < 0.7 else {}
        return {**typed, "const": value}, lambda d: value

    def nullable(self, depth):
        rng = self.rng
        if rng.random() < 0.4:
            schema, make = rng.choice([self.string, self.integer, self.number, self.boolean])(depth)
            if isinstance(schema.get("type"), str):
                return {
                    **schema,
                    "type": [schema["type"], "null"],
                }, lambda d: None if rng.random() < 0.3 else make(d)
        schema, make = self.schema(depth + 1)
        parts = [schema, {"type": "null"}]
        if rng.random() < 0.2:
            parts.reverse()
        return {"anyOf": parts}, lambda d: None if d > 5 or rng.random() < 0.3 else make(d)

    def union(self, depth):
        rng = self.rng
        parts = [self.schema(depth + 1) for _ in range(rng.randint(2, 3))]
        return {"anyOf": [schema for schema, _ in parts]}, lambda d: rng.choice(parts)[1](d)

    def tagged(self, depth):
        """A discriminated union."""
        rng = self.rng
        tag = rng.choice(TAGS)
        keyword = "anyOf" if self.strict else "oneOf"
        branches, makes = [], []
        for n in range(rng.randint(2, 4)):
            schema, make = self.object(depth + 1, {tag: f"t{n}"})
            if not self.zod and rng.random() < 0.7:
                name = f"B{len(self.defs)}"
                self.defs[name] = schema
                schema = {"$ref": f"#/$defs/{name}"}
            branches.append(schema)
            makes.append(make)
        return {keyword: branches}, lambda d: rng.choice(makes)(d)

    def reference(self, depth):
        rng = self.rng
        if self.names_left and rng.random() < 0.7:
            name = self.names_left.pop()
            self.defs[name] = None
            slot = {}
            self.makes[name] = lambda d: slot["make"](d)
            self.defs[name], slot["make"] = self.object(depth + 1)
        ready = list(self.makes)
        if not ready:
            if self.names_left:
                return self.reference(depth)
            return self.boolean(depth)
        name = rng.choice(ready)
        schema = {"$ref": f"#/$defs/{name}"}

        def make(d):
            return self.makes[name](d + 1)

        kind = rng.random()
        if self.defs[name] is None:  # within itself: it must be able to end
            if kind < 0.5:
                return {
                    "anyOf": [schema, {"type": "null"}]
                }, lambda d: None if d > 3 or rng.random() < 0.5 else make(d)
            return {
                "type": "array",
                "items": schema,
            }, lambda d: [] if d > 3 else [make(d) for _ in range(rng.randint(0, 2))]
        if kind < 0.2:
            return {"allOf": [schema], "description": "as pydantic 2.0 wrote it", "default": {}}, make
        return schema, make

    def object(self, depth, tags=None):
        rng = self.rng
        names = rng.sample([n for n in NAMES if n not in (tags or {})], rng.randint(0 if depth else 1, 4))
        members = {name: self.schema(depth + 1) for name in names}
        for tag, value in (tags or {}).items():
            members = (
                {
                    tag: (
                        {"type": "string", "const": value} if rng.random() < 0.8 else {"const": value},
                        lambda d, value=value: value,
                    ),
                    **members,
                }
                if rng.random() < 0.7
                else {**members, tag: ({"type": "string", "const": value}, lambda d, value=value: value)}
            )
        required = [name for name in members if self.strict or name in (tags or {}) or rng.random() < 0.6]
        if rng.random() < 0.2:
            rng.shuffle(required)
        found = {"type": "object", "properties": {name: schema for name, (schema, _) in members.items()}}
        if required:
            found["required"] = required
        extra = None
        if self.strict or self.zod or rng.random() < 0.3:
            found["additionalProperties"] = False
        elif rng.random() < 0.15:
            schema, extra = self.schema(depth + 1)
            found["additionalProperties"] = schema
        elif rng.random() < 0.1:
            found["additionalProperties"] = True

            def extra(d):
                return rng.choice([None, 1, "x", {"z": []}])

        def make(d):
            value = {}
            for name, (_, inner) in members.items():
                if name in required or (d < 4 and rng.random() < 0.6):
                    value[name] = inner(d + 1)
            if extra is not None and d < 4:
                for name in rng.sample(["other", "más", "kin", "z z", "_"], rng.randint(0, 2)):
                    value[name] = extra(d + 1)
            return value

        return found, make

    def array(self, depth):
        rng = self.rng
        schema, make = self.schema(depth + 1)
        low, high = rng.choice([(None, None), (None, None), (1, None), (0, 3), (2, 4), (None, 1), (1, 1)])
        found = {"type": "array", "items": schema}
        if low is not None:
            found["minItems"] = low
        if high is not None:
            found["maxItems"] = high
        return found, lambda d: [
            make(d + 1)
            for _ in range(
                rng.randint(low or 0, min(high if high is not None else 9, (low or 0) + (2 if d < 4 else 0)))
            )
        ]

    def tuple(self, depth):
        rng = self.rng
        parts = [self.schema(depth + 1) for _ in range(rng.randint(1, 3))]
        found = {"type": "array", "prefixItems": [schema for schema, _ in parts], "minItems": len(parts)}
        if self.zod or rng.random() < 0.4:
            found["items"] = False
        if not self.zod or rng.random() < 0.4:
            found["maxItems"] = len(parts)
        return found, lambda d: [make(d + 1) for _, make in parts]

    def record(self, depth):
        rng = self.rng
        schema, make = self.schema(depth + 1)
        found = {"type": "object", "additionalProperties": schema}
        kind = rng.random()
        names = ["a", "b c", "é", "z9"]
        if kind < 0.2:
            found["propertyNames"] = {"type": "string"}
        elif kind < 0.35:
            names = ["r", "g"]
            found["propertyNames"] = {"enum": names}
            if self.zod:
                found["propertyNames"]["type"] = "string"
                found["required"] = names
                return found, lambda d: {name: make(d + 1) for name in names}
            return found, lambda d: {name: make(d + 1) for name in names if rng.random() < 0.5}
        elif kind < 0.5:
            names = ["ab", "cd"]
            found["propertyNames"] = {"pattern": "^[a-z]{2}$"}
        elif kind < 0.6:
            names = ["ab", "cd"]
            found = {"type": "object", "patternProperties": {"^[a-z]{2}$": schema}}
            if self.zod or rng.random() < 0.5:
                found["additionalProperties"] = False
        elif kind < 0.7:
            found["minProperties"] = 1
            return found, lambda d: {name: make(d + 1) for name in rng.sample(names, rng.randint(1, 2))}
        elif kind < 0.8:
            found["maxProperties"] = 2
        return found, lambda d: {
            name: make(d + 1) for name in rng.sample(names, rng.randint(0, 2 if d < 4 else 0))
        }

    def merged(self, depth):
        """zod's intersections, pydantic's json_schema_extra."""
        a, b = self.object(depth + 1), self.object(depth + 1)
        left, right = a[0], b[0]
        for part in (left, right):
            part.pop("additionalProperties", None)
        shared = left["properties"].keys() & right["properties"].keys()
        for name in shared:
            right["properties"].pop(name)
            if name in right.get("required", ()):
                right["required"] = [n for n in right["required"] if n != name]
        if not right.get("required"):
            right.pop("required", None)

        def make(d):
            value = {**b[1](d + 1), **a[1](d + 1)}
            order = [*left["properties"], *right["properties"]]
            return {name: value[name] for name in order if name in value}

        return {"allOf": [left, right]}, make


def made(seed):
    return Maker(seed).document()
