"""Random schemas, by seed, with every keyword: what the test suite tries one by one, all mixed."""

import random

NAMES = ["a", "b", "kind", "näme", "x-1", "with space", 'q"uote', "日本", "$ref", "not"]
PATTERNS = [
    "^[a-z]{1,4}$",
    "^x-",
    "[0-9]+$",
    "a|b",
    "^(foo|bar)+$",
    "^\\d{3}-\\w+$",
    "^[^\\s]{2,5}$",
    "é",
    "^.{0,3}$",
]
FORMATS = [
    "date",
    "time",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uri",
    "uuid",
    "json-pointer",
    "regex",
    "int32",
]
VALUES = [None, True, False, 0, 1, 1.0, -3, 2.5, "", "a", "foo", 'é"\\', [], [1, "a"], {}, {"a": 1}, 10**12]
TITLES = {
    "title": "T",
    "description": "d",
    "default": 3,
    "examples": [1],
    "$comment": "c",
    "deprecated": True,
}


class Maker:
    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.defined = [f"d{n}" for n in range(self.rng.randint(0, 3))]

    def document(self):
        schema = self.schema(0)
        if isinstance(schema, bool):
            schema = {}
        if self.rng.random() < 0.2:
            schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
        if self.defined:
            schema["$defs"] = {name: self.schema(1) for name in self.defined}
        return schema

    def parameters(self):
        """A tool's parameters."""
        schema = {"type": "object"}
        self._object(schema, 0)
        if self.rng.random() < 0.2:
            self._applied(schema, 0)
        if self.defined:
            schema["$defs"] = {name: self.schema(1) for name in self.defined}
        return schema

    def schema(self, depth):
        rng = self.rng
        if rng.random() < 0.04:
            return rng.random() < 0.8
        kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "any"]
        kinds += ["object", "array"] * 3 if depth < 3 else []
        found = {}
        kind = rng.choice(kinds)
        if kind in ("string", "integer", "number", "boolean", "null", "object", "array"):
            if rng.random() < 0.9:
                found["type"] = (
                    kind if rng.random() < 0.9 else [kind, rng.choice(["null", "string", "boolean"])]
                )
            if isinstance(found.get("type"), list):
                found["type"] = sorted(set(found["type"]))
            getattr(self, "_" + kind, lambda found, depth: None)(found, depth)
        elif kind == "enum":
            found["enum"] = rng.sample(VALUES, rng.randint(1, 5))
        elif kind == "const":
            found["const"] = rng.choice(VALUES)
        if rng.random() < 0.15 and depth < 3:
            self._applied(found, depth)
        if rng.random() < 0.1 and self.defined:
            found["$ref"] = f"#/$defs/{rng.choice(self.defined)}"
        if rng.random() < 0.2:
            found.update(dict(rng.sample(sorted(TITLES.items(), key=str), 2)))
        return found

    def _string(self, found, depth):
        rng = self.rng
        if rng.random() < 0.3:
            found["minLength"] = rng.randint(0, 4)
        if rng.random() < 0.3:
            found["maxLength"] = rng.randint(0, 8)
        if rng.random() < 0.3:
            found["pattern"] = rng.choice(PATTERNS)
        elif rng.random() < 0.3:
            found["format"] = rng.choice(FORMATS)

    def _integer(self, found, depth):
        for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if self.rng.random() < 0.25:
                found[keyword] = self.rng.choice([-120, -7, 0, 1, 3, 9, 41, 100, 1000, 2.5])
        if self.rng.random() < 0.1:
            found["multipleOf"] = self.rng.choice([1, 2, 3, 10, 0.5])

    def _number(self, found, depth):
        for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if self.rng.random() < 0.25:
                found[keyword] = self.rng.choice(
                    [-120.5, -7, -0.25, 0, 0.1, 1, 3.75, 9.99, 41, 100, 1e5, 123.456]
                )

    def _array(self, found, depth):
        rng = self.rng
        if rng.random() < 0.7:
            found["items"] = self.schema(depth + 1)
        if rng.random() < 0.3:
            found["prefixItems"] = [self.schema(depth + 1) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.4:
            found["minItems"] = rng.randint(0, 3)
        if rng.random() < 0.4:
            found["maxItems"] = rng.randint(0, 4)
        for keyword, chance in (("uniqueItems", 0.04), ("contains", 0.04), ("unevaluatedItems", 0.05)):
            if rng.random() < chance:
                found[keyword] = True if keyword == "uniqueItems" else self.schema(3)

    def _object(self, found, depth):
        rng = self.rng
        names = rng.sample(NAMES, rng.randint(0, 4))
        if names or rng.random() < 0.3:
            found["properties"] = {name: self.schema(depth + 1) for name in names}
        if names and rng.random() < 0.7:
            found["required"] = rng.sample(names, rng.randint(1, len(names)))
        if rng.random() < 0.05:
            found["required"] = [*found.get("required", []), "elsewhere"]
        if rng.random() < 0.4:
            found["additionalProperties"] = rng.choice([False, False, True, self.schema(3)])
        if rng.random() < 0.12:
            found["patternProperties"] = {p: self.schema(3) for p in rng.sample(PATTERNS, rng.randint(1, 2))}
        if rng.random() < 0.08:
            found["propertyNames"] = rng.choice(
                [
                    {"pattern": "^[a-z]+$"},
                    {"maxLength": 4},
                    {"enum": ["a", "b"]},
                    {"minLength": 1, "maxLength": 6},
                    {"not": {"enum": [""]}},
                    {"pattern": "^[a-z]+$", "not": {"const": rng.choice(["", "A", "a"])}},
                ]
            )
        if rng.random() < 0.15:
            found["minProperties"] = rng.randint(0, 2)
        if rng.random() < 0.15:
            found["maxProperties"] = rng.randint(0, 4)
        if names and rng.random() < 0.05:
            found["dependentRequired"] = {names[0]: [rng.choice(NAMES)]}
        if names and rng.random() < 0.05:
            found["dependentSchemas"] = {names[0]: self.schema(3)}
        if rng.random() < 0.08:
            found["unevaluatedProperties"] = rng.choice([False, self.schema(3)])

    def _applied(self, found, depth):
        rng = self.rng
        keyword = rng.choice(["anyOf", "anyOf", "oneOf", "allOf", "not", "if"])
        if keyword == "not":
            found["not"] = rng.choice([{"type": "string"}, {"required": ["a"]}, {"const": 1}, self.schema(3)])
        elif keyword == "if":
            test = {"properties": {"kind": {"const": rng.choice([1, "a"])}}}
            if rng.random() < 0.5:
                test["required"] = ["kind"]
            found |= {"if": test, "then": self.schema(3), "else": self.schema(3)}
        else:
            branches = [self.schema(depth + 1) for _ in range(rng.randint(1, 3))]
            if keyword == "oneOf" and rng.random() < 0.6:
                branches = [
                    {
                        "type": "object",
                        "properties": {"kind": {"const": n}, "a": self.schema(3)},
                        "required": ["kind"],
                    }
                    for n in range(3)
                ]
            found[keyword] = branches


def made(count, first=0):
    """{seed: schema}"""
    return {f"made {seed}": Maker(seed).document() for seed in range(first, first + count)}
