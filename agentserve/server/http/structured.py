"""vLLM's names for the form of an answer (`structured_outputs`, `guided_*`), as ours.

JSON becomes a `response_format`; a pattern, a choice, a grammar and a structural tag become parts of the
`Form`.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from agentserve.server.errors import ApiError
from agentserve.server.http.schemas import JsonSchemaFormat, ResponseFormat, SamplingFields
from agentserve.server.http.structure import Form
from agentserve.server.text_port import JsonObject

Fields = TypeVar("Fields", bound=SamplingFields)
Value = TypeVar("Value")

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


def as_response_format(fields: Fields) -> Fields:
    """The request with a wanted JSON form in `response_format` alone; what contradicts itself is a 400."""
    wanted = _wanted(fields)
    if not wanted:
        return fields
    if len(wanted) > 1:
        raise ApiError(
            f"{wanted[1][0]}: only one form can be asked for, and {wanted[0][0]} asks for another",
            param=wanted[1][0],
        )
    [(param, kind, value)] = wanted
    if fields.response_format is not None and fields.response_format.type != "text":
        raise ApiError(f"{param}: cannot be used with response_format", param=param)
    if kind not in ("json", "json_object"):
        return fields
    form = ResponseFormat("json_object")
    if kind == "json":
        form = ResponseFormat("json_schema", JsonSchemaFormat(schema=_schema(value, param)))
    return replace(
        fields,
        response_format=form,
        structured_outputs=None,
        guided_json=None,
        guided_regex=None,
        guided_choice=None,
        guided_grammar=None,
    )


def other_form(form: Form, fields: SamplingFields) -> Form:
    """`form`, and what of the wanted one is no JSON. `fields`: as `as_response_format` gave them."""
    for param, kind, value in _wanted(fields):
        match kind, value:
            case "regex", str():
                form = dataclasses.replace(form, regex=_some(value, param))
            case "choice", list():
                form = dataclasses.replace(form, choices=tuple(_some(value, param)))
            case "grammar", str():
                form = dataclasses.replace(form, ebnf=_some(value, param))
            case "structural_tag", _:
                form = dataclasses.replace(form, structural_tag=_some(_schema(value, param), param))
    return form


def _some(value: Value, param: str) -> Value:
    if not value:
        raise ApiError(f"{param}: must not be empty", param=param)
    return value


def _wanted(fields: SamplingFields) -> list[tuple[str, str, object]]:
    """(parameter, kind, value) of each form that is asked for."""
    found: list[tuple[str, str, object]] = []
    given = fields.structured_outputs
    if given is not None:
        for kind in given.__struct_fields__:
            value = getattr(given, kind)
            if value is not None and value is not False:
                found.append((f"structured_outputs.{kind}", kind, value))
    for param, kind in _GUIDED.items():
        value = getattr(fields, param)
        if value is not None:
            found.append((param, kind, value))
    return found


def _schema(value: object, param: str) -> JsonObject:
    """A schema as an object, or as the text of one."""
    if isinstance(value, str):
        try:
            return msgspec.json.decode(value, type=JsonObject)
        except msgspec.DecodeError:
            raise ApiError(f"{param}: is not the JSON of an object", param=param) from None
    assert isinstance(value, dict)  # its type says so
    return value
