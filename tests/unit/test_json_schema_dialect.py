"""What the type of a value is, in one place."""

import pytest

from tools_bridge.json_schema.dialect import TYPES, type_of, written_type


@pytest.mark.parametrize(
    ("value", "written", "type_"),
    [
        (None, "null", "null"),
        (True, "boolean", "boolean"),
        (0, "integer", "integer"),
        (1.0, "number", "integer"),
        (1e300, "number", "integer"),
        (1.5, "number", "fraction"),
        ("1", "string", "string"),
        ([], "array", "array"),
        ((1,), "array", "array"),
        ({}, "object", "object"),
    ],
)
def test_the_type_of_a_value(value, written, type_):
    assert (written_type(value), type_of(value)) == (written, type_)
    assert type_ in TYPES[written]
