"""vLLM's names for the form of an answer (`structured_outputs`, `guided_*`), as ours.

JSON becomes a `response_format`, which every later place knows; the others are refused: an answer
without the asked-for form is worse than none.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec.structs import replace

from agentserve.server.errors import ApiError
from agentserve.server.http.schemas import JsonSchemaFormat, ResponseFormat, SamplingFields
from agentserve.server.text_port import JsonObject

Fields = TypeVar("Fields", bound=SamplingFields)

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


def as_response_format(fields: Fields) -> Fields:
    """The request with its wanted form in `response_format` alone."""
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
        raise ApiError(
            f"{param}: not supported yet; use a JSON schema", param=param, code="unsupported_parameter"
        )
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
            raise ApiError(f"{param}: is not the JSON of a schema", param=param) from None
    assert isinstance(value, dict)  # its type says so
    return value
