# ruff: noqa: E501 - patterns as they come
"""What zod 4.6 (`z.toJSONSchema`) and pydantic 2.14 make of their types: accepted under `strict`, or refused
by name."""

import json

import jsonschema
import numpy as np
import pytest

from agentserve.executor.grammars import GrammarStore
from tests.grammar_rig import BYTES, EOS, REQUIRED, VOCAB, sources_of_bytes
from tests.schema_rig import Drawer
from tools_bridge.grammar import GrammarError, ResponseFormat, reply_grammar
from tools_bridge.types import ToolSpec

ZOD = {
    "email": (
        {
            "type": "string",
            "format": "email",
            "pattern": "^(?:[A-Za-z0-9_'+\\-]+\\.)*[A-Za-z0-9_'+\\-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9\\-]*\\.)+[A-Za-z]{2,}$",
        },
        ["a.b@example.com"],
    ),
    "html5email": (
        {
            "type": "string",
            "format": "email",
            "pattern": "^[a-zA-Z0-9.!#$%&'*+/=?^_`{|}~-]+@[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?(?:\\.[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?)*$",
        },
        ["a@b"],
    ),
    "rfcemail": (
        {
            "type": "string",
            "format": "email",
            "pattern": '^(([^<>()\\[\\]\\\\.,;:\\s@"]+(\\.[^<>()\\[\\]\\\\.,;:\\s@"]+)*)|(".+"))@((\\[[0-9]{1,3}\\.[0-9]{1,3}\\.[0-9]{1,3}\\.[0-9]{1,3}])|(([a-zA-Z\\-0-9]+\\.)+[a-zA-Z]{2,}))$',
        },
        ["a.b@example.com"],
    ),
    "unicodeemail": (
        {"type": "string", "format": "email", "pattern": '^[^\\s@"]{1,64}@[^\\s@]{1,255}$'},
        ["é@b"],
    ),
    "uuid": (
        {
            "type": "string",
            "format": "uuid",
            "pattern": "^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}|00000000-0000-0000-0000-000000000000|ffffffff-ffff-ffff-ffff-ffffffffffff)$",
        },
        ["0f8fad5b-d9cb-469f-a165-70867728950e"],
    ),
    "uuidv4": (
        {
            "type": "string",
            "format": "uuid",
            "pattern": "^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-4[0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12})$",
        },
        ["0f8fad5b-d9cb-469f-a165-70867728950e"],
    ),
    "guid": (
        {
            "type": "string",
            "format": "uuid",
            "pattern": "^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12})$",
        },
        ["0f8fad5b-d9cb-469f-a165-70867728950e"],
    ),
    "url": ({"type": "string", "format": "uri"}, ["https://a.b/c?d=1#e"]),
    "hostname": (
        {
            "type": "string",
            "format": "hostname",
            "pattern": "^(?=.{1,253}\\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?(?:\\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\\.?$",
        },
        ["www.example.com"],
    ),
    "nanoid": (
        {"type": "string", "format": "nanoid", "pattern": "^[a-zA-Z0-9_-]{21}$"},
        ["V1StGXR8_Z5jdHi6B-myT"],
    ),
    "cuid": (
        {"type": "string", "format": "cuid", "pattern": "^[cC][0-9a-z]{6,}$"},
        ["cjld2cjxh0000qzrmn831i7rn"],
    ),
    "cuid2": ({"type": "string", "format": "cuid2", "pattern": "^[0-9a-z]+$"}, ["tz4a98xxat96iws9zmbrgj3a"]),
    "ulid": (
        {"type": "string", "format": "ulid", "pattern": "^[0-7][0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{25}$"},
        ["01ARZ3NDEKTSV4RRFFQ69G5FAV"],
    ),
    "xid": ({"type": "string", "format": "xid", "pattern": "^[0-9a-vA-V]{20}$"}, ["9m4e2mr0ui3e8a215n4g"]),
    "ksuid": (
        {"type": "string", "format": "ksuid", "pattern": "^[A-Za-z0-9]{27}$"},
        ["0ujsswThIGTUYm2K8FjOOfXtY1K"],
    ),
    "ipv4": (
        {
            "type": "string",
            "format": "ipv4",
            "pattern": "^(?:(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])\\.){3}(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])$",
        },
        ["10.0.0.255"],
    ),
    "ipv6": (
        {
            "type": "string",
            "format": "ipv6",
            "pattern": "^(([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}|([0-9a-fA-F]{1,4}:){1,7}:|([0-9a-fA-F]{1,4}:){1,6}:[0-9a-fA-F]{1,4}|([0-9a-fA-F]{1,4}:){1,5}(:[0-9a-fA-F]{1,4}){1,2}|([0-9a-fA-F]{1,4}:){1,4}(:[0-9a-fA-F]{1,4}){1,3}|([0-9a-fA-F]{1,4}:){1,3}(:[0-9a-fA-F]{1,4}){1,4}|([0-9a-fA-F]{1,4}:){1,2}(:[0-9a-fA-F]{1,4}){1,5}|[0-9a-fA-F]{1,4}:((:[0-9a-fA-F]{1,4}){1,6})|:((:[0-9a-fA-F]{1,4}){1,7}|:))$",
        },
        ["2001:db8::1"],
    ),
    "mac": (
        {
            "type": "string",
            "format": "mac",
            "pattern": "^(?:[0-9A-F]{2}:){5}[0-9A-F]{2}$|^(?:[0-9a-f]{2}:){5}[0-9a-f]{2}$",
        },
        ["00:1A:2B:3C:4D:5E"],
    ),
    "cidrv4": (
        {
            "type": "string",
            "format": "cidrv4",
            "pattern": "^((25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])\\.){3}(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])\\/([0-9]|[1-2][0-9]|3[0-2])$",
        },
        ["10.0.0.0/8"],
    ),
    "cidrv6": (
        {
            "type": "string",
            "format": "cidrv6",
            "pattern": "^(([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}|([0-9a-fA-F]{1,4}:){1,7}:|([0-9a-fA-F]{1,4}:){1,6}:[0-9a-fA-F]{1,4}|([0-9a-fA-F]{1,4}:){1,5}(:[0-9a-fA-F]{1,4}){1,2}|([0-9a-fA-F]{1,4}:){1,4}(:[0-9a-fA-F]{1,4}){1,3}|([0-9a-fA-F]{1,4}:){1,3}(:[0-9a-fA-F]{1,4}){1,4}|([0-9a-fA-F]{1,4}:){1,2}(:[0-9a-fA-F]{1,4}){1,5}|[0-9a-fA-F]{1,4}:((:[0-9a-fA-F]{1,4}){1,6})|:((:[0-9a-fA-F]{1,4}){1,7}|:))\\/(12[0-8]|1[01][0-9]|[1-9]?[0-9])$",
        },
        ["2001:db8::/32"],
    ),
    "base64": (
        {
            "type": "string",
            "format": "base64",
            "contentEncoding": "base64",
            "pattern": "^$|^(?:[0-9a-zA-Z+/]{4})*(?:(?:[0-9a-zA-Z+/]{2}==)|(?:[0-9a-zA-Z+/]{3}=))?$",
        },
        ["YWI=", ""],
    ),
    "base64url": (
        {
            "type": "string",
            "format": "base64url",
            "contentEncoding": "base64url",
            "pattern": "^(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-]{2,3})?$",
        },
        ["YWI"],
    ),
    "e164": ({"type": "string", "format": "e164", "pattern": "^\\+[1-9]\\d{6,14}$"}, ["+14155552671"]),
    "jwt": ({"type": "string", "format": "jwt"}, ["a.b.c"]),
    "date": (
        {
            "type": "string",
            "format": "date",
            "pattern": "^(?:(?:\\d\\d[2468][048]|\\d\\d[13579][26]|\\d\\d0[48]|[02468][048]00|[13579][26]00)-02-29|\\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\\d|30)|(?:02)-(?:0[1-9]|1\\d|2[0-8])))$",
        },
        ["2024-02-29"],
    ),
    "time": (
        {"type": "string", "pattern": "^(?:[01]\\d|2[0-3]):[0-5]\\d(?::[0-5]\\d(?:\\.\\d+)?)?$"},
        ["09:30", "09:30:00.5"],
    ),
    "datetime": (
        {
            "type": "string",
            "format": "date-time",
            "pattern": "^(?:(?:\\d\\d[2468][048]|\\d\\d[13579][26]|\\d\\d0[48]|[02468][048]00|[13579][26]00)-02-29|\\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\\d|30)|(?:02)-(?:0[1-9]|1\\d|2[0-8])))T(?:(?:[01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(?:\\.\\d+)?(?:Z))$",
        },
        ["2024-02-29T09:30:00Z"],
    ),
    "datetimeoff": (
        {
            "type": "string",
            "format": "date-time",
            "pattern": "^(?:(?:\\d\\d[2468][048]|\\d\\d[13579][26]|\\d\\d0[48]|[02468][048]00|[13579][26]00)-02-29|\\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\\d|30)|(?:02)-(?:0[1-9]|1\\d|2[0-8])))T(?:(?:[01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(?:\\.\\d+)?(?:Z|([+-](?:[01]\\d|2[0-3]):[0-5]\\d)))$",
        },
        ["2024-02-29T09:30:00+02:00"],
    ),
    "datetimelocal": (
        {
            "type": "string",
            "pattern": "^(?:(?:\\d\\d[2468][048]|\\d\\d[13579][26]|\\d\\d0[48]|[02468][048]00|[13579][26]00)-02-29|\\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\\d|30)|(?:02)-(?:0[1-9]|1\\d|2[0-8])))T(?:(?:[01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(?:\\.\\d+)?(?:Z)|(?:[01]\\d|2[0-3]):[0-5]\\d(?::[0-5]\\d(?:\\.\\d+)?)?)$",
        },
        ["2024-02-29T09:30"],
    ),
    "duration": (
        {
            "type": "string",
            "format": "duration",
            "pattern": "^P(?:(\\d+W)|(?!.*W)(?=\\d|T\\d)(\\d+Y)?(\\d+M)?(\\d+D)?(T(?=\\d)(\\d+H)?(\\d+M)?(\\d+([.,]\\d+)?S)?)?)$",
        },
        ["P1DT2H", "P3W"],
    ),
    "starts": ({"type": "string", "format": "starts_with", "pattern": "^a\\..*"}, ["a.", "a.x"]),
    "ends": ({"type": "string", "format": "ends_with", "pattern": ".*\\.b$"}, ["x.b"]),
    "both": (
        {"type": "string", "format": "ends_with", "allOf": [{"pattern": "^a\\..*"}, {"pattern": ".*\\.b$"}]},
        ["a.x.b"],
    ),
    "includes": ({"type": "string", "format": "includes", "pattern": "mid"}, ["amidb"]),
    "three": (
        {
            "type": "string",
            "format": "ends_with",
            "allOf": [{"pattern": "^a.*"}, {"pattern": "m"}, {"pattern": ".*b$"}],
        },
        ["axmxb", "amb"],
    ),
    "lower": ({"type": "string", "format": "lowercase", "pattern": "^[^A-Z]*$"}, ["ab é"]),
    "upper": ({"type": "string", "format": "uppercase", "pattern": "^[^a-z]*$"}, ["AB"]),
    "len": ({"type": "string", "minLength": 5, "maxLength": 5}, ["abcde"]),
    "emailmax": (
        {
            "type": "string",
            "maxLength": 50,
            "format": "email",
            "pattern": "^(?:[A-Za-z0-9_'+\\-]+\\.)*[A-Za-z0-9_'+\\-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9\\-]*\\.)+[A-Za-z]{2,}$",
        },
        ["a.b@example.com"],
    ),
    "urlmax": ({"type": "string", "maxLength": 100, "format": "uri"}, ["https://www.example.com/a"]),
    "tmpl": ({"type": "string", "pattern": "^id--?\\d+(?:\\.\\d+)?$"}, ["id--1.5"]),
    "int": (
        {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
        [0, -9007199254740991, 9007199254740991],
    ),
    "int32": ({"type": "integer", "minimum": -2147483648, "maximum": 2147483647}, [-2147483648]),
    "number": ({"type": "number"}, [1.5, -20000000000.0]),
    "float32": (
        {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38},
        [0, 1.5, -1000.0],
    ),
    "float64": (
        {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
        [1.5],
    ),
    "pos": ({"type": "number", "exclusiveMinimum": 0}, [0.5]),
    "numintpos": ({"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991}, [1]),
    "nullable": ({"type": ["string", "null"]}, [None, "a"]),
    "optional": (
        {
            "type": "object",
            "properties": {"a": {"type": "string"}, "b": {"default": 3, "type": "number"}},
            "required": ["b"],
            "additionalProperties": False,
        },
        [{"b": 3}, {"a": "x", "b": 1.5}],
    ),
    "literal": ({"enum": ["x", 2]}, ["x", 2]),
    "union": ({"type": ["string", "number"]}, ["a", 1.5]),
    "disc": (
        {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"k": {"type": "string", "const": "a"}, "a": {"type": "string"}},
                    "required": ["k", "a"],
                    "additionalProperties": False,
                },
                {
                    "type": "object",
                    "properties": {
                        "k": {"type": "string", "const": "b"},
                        "b": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
                    },
                    "required": ["k", "b"],
                    "additionalProperties": False,
                },
            ]
        },
        [{"k": "b", "b": 1}],
    ),
    "record": (
        {
            "type": "object",
            "propertyNames": {"type": "string"},
            "additionalProperties": {
                "type": "integer",
                "minimum": -9007199254740991,
                "maximum": 9007199254740991,
            },
        },
        [{"x": 1}],
    ),
    "recordenum": (
        {
            "type": "object",
            "propertyNames": {"type": "string", "enum": ["a", "b"]},
            "additionalProperties": {
                "type": "integer",
                "minimum": -9007199254740991,
                "maximum": 9007199254740991,
            },
            "required": ["a", "b"],
        },
        [{"a": 1, "b": 2}],
    ),
    "partialrecord": (
        {
            "type": "object",
            "propertyNames": {"type": "string", "enum": ["a", "b"]},
            "additionalProperties": {
                "type": "integer",
                "minimum": -9007199254740991,
                "maximum": 9007199254740991,
            },
        },
        [{"b": 1}, {}],
    ),
    "recordemail": (
        {
            "type": "object",
            "propertyNames": {
                "type": "string",
                "format": "uuid",
                "pattern": "^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}|00000000-0000-0000-0000-000000000000|ffffffff-ffff-ffff-ffff-ffffffffffff)$",
            },
            "additionalProperties": {
                "type": "integer",
                "minimum": -9007199254740991,
                "maximum": 9007199254740991,
            },
        },
        [{"0f8fad5b-d9cb-469f-a165-70867728950e": 1}],
    ),
    "tuple": (
        {
            "type": "array",
            "prefixItems": [
                {"type": "string"},
                {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
            ],
            "items": False,
            "minItems": 2,
            "maxItems": 2,
        },
        [["a", 1]],
    ),
    "tuplerest": (
        {
            "type": "array",
            "prefixItems": [{"type": "string"}],
            "items": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
            "minItems": 1,
        },
        [["a"], ["a", 1, 2]],
    ),
    "array": (
        {
            "minItems": 1,
            "maxItems": 3,
            "type": "array",
            "items": {
                "type": "string",
                "format": "email",
                "pattern": "^(?:[A-Za-z0-9_'+\\-]+\\.)*[A-Za-z0-9_'+\\-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9\\-]*\\.)+[A-Za-z]{2,}$",
            },
        },
        [["a@example.com"]],
    ),
    "loose": (
        {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991}
            },
            "required": ["a"],
            "additionalProperties": {},
        },
        [{"a": 1, "b": []}],
    ),
    "catchall": (
        {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991}
            },
            "required": ["a"],
            "additionalProperties": {"type": "string"},
        },
        [{"a": 1, "b": "x"}],
    ),
    "inter": (
        {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
                "b": {"type": "string"},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        [{"a": 1, "b": "x"}],
    ),
    "any": ({}, [[1]]),
    "never": ({"type": "object", "properties": {"a": {"not": {}}}, "additionalProperties": False}, [{}]),
    "lazy": (
        {
            "type": "object",
            "properties": {
                "v": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
                "c": {"type": "array", "items": {"$ref": "#"}},
            },
            "required": ["v", "c"],
            "additionalProperties": False,
        },
        [{"v": 1, "c": [{"v": 2, "c": []}]}],
    ),
    "file": ({"type": "string", "format": "binary", "contentEncoding": "binary"}, ["x"]),
}
PYDANTIC = {
    "HttpUrl": (
        {"format": "uri", "maxLength": 2083, "minLength": 1, "type": "string"},
        ["https://example.com/a?b=c", "http://localhost"],
    ),
    "AnyUrl": ({"format": "uri", "minLength": 1, "type": "string"}, ["ftp://a.b/c"]),
    "hostlen": (
        {"format": "uri", "maxLength": 50, "minLength": 1, "type": "string"},
        ["https://example.com/a"],
    ),
    "UUID": ({"format": "uuid", "type": "string"}, ["0f8fad5b-d9cb-469f-a165-70867728950e"]),
    "UUID4": ({"format": "uuid4", "type": "string"}, ["0f8fad5b-d9cb-469f-a165-70867728950e"]),
    "date": ({"format": "date", "type": "string"}, ["2024-02-29"]),
    "time": ({"format": "time", "type": "string"}, ["09:30:00Z"]),
    "datetime": ({"format": "date-time", "type": "string"}, ["2024-02-29T09:30:00+02:00"]),
    "timedelta": ({"format": "duration", "type": "string"}, ["P1DT2H"]),
    "Decimal": ({"anyOf": [{"type": "number"}, {"type": "string"}]}, [1.5, "1.5"]),
    "dec_ge": (
        {"anyOf": [{"maximum": 100.0, "minimum": 0.0, "type": "number"}, {"type": "string"}]},
        [99.5, "99"],
    ),
    "conint": ({"maximum": 9223372036854775807, "minimum": 0, "type": "integer"}, [0, 9007199254740992]),
    "conint64": ({"maximum": 9223372036854775807, "minimum": -9223372036854775808, "type": "integer"}, [-5]),
    "uint64": ({"maximum": 18446744073709551615, "minimum": 0, "type": "integer"}, [5]),
    "confloat": ({"maximum": 1.0, "minimum": 1e-07, "type": "number"}, [0.5, 1]),
    "confloat2": (
        {"exclusiveMaximum": 9223372036854775807, "exclusiveMinimum": 0, "type": "number"},
        [0.5, 100],
    ),
    "confloat3": ({"maximum": 1e300, "minimum": 0.1, "type": "number"}, [0.1, 5000]),
    "ipv4": ({"format": "ipv4", "type": "string"}, ["10.0.0.1"]),
    "ipv6": ({"format": "ipv6", "type": "string"}, ["2001:db8::1"]),
    "ipnet": ({"format": "ipv4network", "type": "string"}, ["10.0.0.0/8"]),
    "Path": ({"format": "path", "type": "string"}, ["/a/b"]),
    "Secret": ({"format": "password", "type": "string", "writeOnly": True}, ["x"]),
    "SecretMax": (
        {"format": "password", "maxLength": 64, "minLength": 8, "type": "string", "writeOnly": True},
        ["12345678"],
    ),
    "Literal": ({"enum": ["a", 1, None]}, ["a", 1, None]),
    "Color": ({"enum": ["r", "g"], "type": "string"}, ["g"]),
    "Num": ({"enum": [1, 2], "type": "integer"}, [2]),
    "Opt": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, [None, 3]),
    "Model": (
        {
            "$defs": {
                "A": {
                    "properties": {"k": {"const": "a", "type": "string"}, "x": {"type": "integer"}},
                    "required": ["k", "x"],
                    "type": "object",
                },
                "B": {
                    "properties": {"k": {"const": "b", "type": "string"}, "y": {"type": "string"}},
                    "required": ["k", "y"],
                    "type": "object",
                },
            },
            "properties": {
                "o": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
                "u": {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]},
            },
            "required": ["u"],
            "type": "object",
        },
        [{"u": {"k": "a", "x": 1}}, {"o": None, "u": {"k": "b", "y": "z"}}],
    ),
    "Node": (
        {
            "$defs": {
                "Node": {
                    "properties": {
                        "v": {"type": "integer"},
                        "c": {"default": [], "items": {"$ref": "#/$defs/Node"}, "type": "array"},
                    },
                    "required": ["v"],
                    "type": "object",
                }
            },
            "$ref": "#/$defs/Node",
        },
        [{"v": 1}, {"v": 1, "c": [{"v": 2}]}],
    ),
    "dict": ({"additionalProperties": {"type": "integer"}, "type": "object"}, [{"a": 1}]),
    "tup": (
        {
            "maxItems": 2,
            "minItems": 2,
            "prefixItems": [{"type": "string"}, {"type": "integer"}],
            "type": "array",
        },
        [["a", 1]],
    ),
    "tupv": ({"items": {"type": "integer"}, "type": "array"}, [[1, 2]]),
    "bytes": ({"format": "binary", "type": "string"}, ["x"]),
    "Json": (
        {"contentMediaType": "application/json", "contentSchema": {"type": "integer"}, "type": "string"},
        ["1"],
    ),
    "constr": ({"maxLength": 8, "pattern": "^\\d{3}-\\d{4}$", "type": "string"}, ["123-4567"]),
    "conlist": ({"items": {"type": "integer"}, "maxItems": 3, "minItems": 1, "type": "array"}, [[1]]),
    "PosF": ({"exclusiveMinimum": 0, "type": "number"}, [0.5]),
    "Any": ({}, [None]),
    "Pg": ({"format": "multi-host-uri", "minLength": 1, "type": "string"}, ["postgres://a/b"]),
    "dictenum": (
        {
            "$defs": {"Color": {"enum": ["r", "g"], "type": "string"}},
            "additionalProperties": {"type": "integer"},
            "propertyNames": {"$ref": "#/$defs/Color"},
            "type": "object",
        },
        [{"r": 1}],
    ),
    "dictuuid": (
        {"additionalProperties": {"type": "integer"}, "propertyNames": {"format": "uuid"}, "type": "object"},
        [{"0f8fad5b-d9cb-469f-a165-70867728950e": 1}],
    ),
    "nested": (
        {
            "additionalProperties": {
                "items": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "type": "array",
            },
            "type": "object",
        },
        [{"a": [1, None]}],
    ),
    "DtTuple": (
        {
            "maxItems": 2,
            "minItems": 2,
            "prefixItems": [
                {"format": "date", "type": "string"},
                {"anyOf": [{"type": "string"}, {"type": "null"}]},
            ],
            "type": "array",
        },
        [["2024-02-29", None]],
    ),
    "EmailStr": ({"type": "string", "format": "email"}, ["a.b@example.com"]),
    "Decimal of 2.12": (
        {"anyOf": [{"type": "number"}, {"type": "string", "pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$"}]},
        [1.5, "-1.5"],
    ),
    "condecimal of 2.12": (
        {
            "anyOf": [
                {"type": "number"},
                {
                    "type": "string",
                    "pattern": "^(?!^[-+.]*$)[+-]?0*(?:\\d{0,3}|(?=[\\d.]{1,6}0*$)\\d{0,3}\\.\\d{0,2}0*$)",
                },
            ]
        },
        [1.5, "-123.45"],
    ),
    "decimal_places of 2.12": (
        {"type": "string", "pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d{0,2}0*$"},
        ["-1.55"],
    ),
}
REFUSED = {
    "zod mult": ({"type": "number", "multipleOf": 0.01}, "multipleOf"),
    "zod mult5": (
        {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991, "multipleOf": 5},
        "multipleOf",
    ),
    "zod emoji": (
        {
            "type": "string",
            "format": "emoji",
            "pattern": "^(?=[\\s\\S]*[\\p{Extended_Pictographic}\\p{Regional_Indicator}\\u20E3])[\\p{Extended_Pictographic}\\p{Emoji_Component}]+$",
        },
        "pattern",
    ),
    "pydantic set": ({"items": {"type": "integer"}, "type": "array", "uniqueItems": True}, "uniqueItems"),
    "pydantic frozenset": (
        {"items": {"type": "string"}, "type": "array", "uniqueItems": True},
        "uniqueItems",
    ),
    "pydantic setmax": (
        {"items": {"type": "integer"}, "maxItems": 3, "minItems": 1, "type": "array", "uniqueItems": True},
        "uniqueItems",
    ),
    "pydantic mult": ({"multipleOf": 3, "type": "integer"}, "multipleOf"),
    "pydantic multf": ({"multipleOf": 0.5, "type": "number"}, "multipleOf"),
    "pydantic pattern": ({"format": "regex", "type": "string"}, "format"),
}
CASES = {f"zod {name}": case for name, case in ZOD.items()} | {
    f"pydantic {name}": case for name, case in PYDANTIC.items()
}


class World:
    """Grammars over bytes."""

    def __init__(self):
        self._compiler = sources_of_bytes()
        self._store = GrammarStore(BYTES, VOCAB, [EOS])
        self._drawer = Drawer([*BYTES, *[b""] * (VOCAB - len(BYTES))], EOS)

    def define(self, source):
        self._store.define("g", self._compiler.compile(source))

    def takes(self, text):
        fold = self._store.start("g")
        return all(fold.push(byte) for byte in text.encode()) and (fold.over or EOS in fold.allowed())

    def drawn(self, seed):
        return self._drawer.text(self._store.start("g"), np.random.default_rng(seed))


@pytest.fixture(scope="module")
def world():
    return World()


def judge(schema):
    validator = jsonschema.Draft202012Validator
    return validator(schema, format_checker=validator.FORMAT_CHECKER)


@pytest.mark.parametrize("name", CASES)
def test_what_frameworks_write_is_held_by_the_letter(world, name):
    schema, samples = CASES[name]
    world.define(reply_grammar(response=ResponseFormat("json_schema", schema, strict=True)))
    for sample in samples:
        assert judge(schema).is_valid(sample), sample
        assert world.takes(json.dumps(sample, ensure_ascii=False)), sample
    for seed in range(3):
        text = world.drawn(seed)
        if text is not None:
            judge(schema).validate(json.loads(text))


BYTE_SIZE = {
    "anyOf": [
        {"pattern": "^\\s*(\\d*\\.?\\d+)\\s*(\\w+)?", "type": "string"},
        {"minimum": 0, "type": "integer"},
    ]
}


def test_a_pattern_that_is_written_ambiguously_is_held(world):
    """pydantic's ByteSize."""
    world.define(reply_grammar(response=ResponseFormat("json_schema", BYTE_SIZE)))
    assert world.takes('"1.5 GB"')
    assert world.takes("3")
    assert not world.takes('"GB"')


@pytest.mark.parametrize("strict", [True, False])
def test_tools_of_frameworks(strict):
    """All of them, as arguments of one tool."""
    definitions = {"A": PYDANTIC["Model"][0]["$defs"]["A"], "B": PYDANTIC["Model"][0]["$defs"]["B"]}
    definitions |= {
        "Color": PYDANTIC["dictenum"][0]["$defs"]["Color"],
        "Node": PYDANTIC["Node"][0]["$defs"]["Node"],
    }
    parts = {name: schema for name, (schema, _) in CASES.items() if name != "zod lazy"}
    parameters = {"type": "object", "properties": parts, "required": [*parts], "$defs": definitions}
    source = reply_grammar([ToolSpec("f", parameters, strict=strict)], REQUIRED)
    assert source is not None
    assert source.left_out == ()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_held_is_refused_by_name_and_left_out_without_strict(world, name):
    schema, keyword = REFUSED[name]
    with pytest.raises(GrammarError, match=f"'{keyword}' .* drop it from the schema, or say"):
        reply_grammar(response=ResponseFormat("json_schema", schema))
    source = reply_grammar(response=ResponseFormat("json_schema", schema, strict=False))
    assert source.left_out == (f"response_format.json_schema.schema: '{keyword}'",)
    world.define(source)
    text = world.drawn(1)
    judge({key: value for key, value in schema.items() if key != keyword}).validate(json.loads(text))
