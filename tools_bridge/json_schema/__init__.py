"""JSON schemas from clients, rewritten so that xgrammar holds all of what they say, or refused by name.

xgrammar compiles a part of JSON Schema and passes over the rest in silence. What is made here has only
what it holds; whatever it lets through is valid for the client's schema. It may let through less: see
`exact`. A schema that is not meant by the letter says less where it cannot be held: see `loose`. Pure:
nothing is compiled.
"""

from tools_bridge.json_schema.calls import MARKS, call_schema
from tools_bridge.json_schema.exact import exact_schema, held_schema
from tools_bridge.json_schema.loose import looser

__all__ = ["MARKS", "call_schema", "exact_schema", "held_schema", "looser"]
