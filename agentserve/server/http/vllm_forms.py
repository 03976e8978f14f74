"""vLLM's names for the form of an answer (`structured_outputs`, `guided_*`), as ours.

JSON becomes a `response_format`; a pattern, a choice, a grammar and a structural tag become parts of the
`Form`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from agentserve.server.errors import ApiError
from agentserve.server.http.answer_form import Form
from agentserve.server.http.schemas import (
    JsonSchemaFormat,
    ResponseFormat,
    SamplingFields,
    StructuredOutputs,
)
from agentserve.server.text_port import JsonObject

Fields = TypeVar("Fields", bound=SamplingFields)
Value = TypeVar("Value")

_IN_OLDER = re.compile(r"^\.format\.tags\[(\d+)\]\.content\.json_schema")
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


def as_response_format(fields: Fields) -> Fields:
    """The request with a wanted JSON form in `response_format` alone; what contradicts itself is a 400."""
    if fields.response_format is not None and fields.response_format.type == "structural_tag":
        if fields.structured_outputs is not None:
            raise ApiError(
                "structured_outputs: cannot be used with response_format", param="structured_outputs"
            )
        tag = StructuredOutputs(structural_tag=_newer(_tag_of(fields.response_format), "response_format"))
        fields = replace(fields, response_format=None, structured_outputs=tag)
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
                tag = _newer(_some(_schema(value, param), param), param)
                form = dataclasses.replace(form, structural_tag=tag)
    return form


@contextmanager
def said_as(fields: SamplingFields) -> Iterator[None]:
    """Errors about the answer's form name the place where the client wrote it. `fields`: as they came."""
    try:
        yield
    except ApiError as error:
        wanted = [(place, value) for place, _, value in _wanted(fields)]
        if fields.response_format is not None and fields.response_format.type == "structural_tag":
            wanted = [("response_format", _tag_of(fields.response_format))]
        if not wanted or not (error.param or "").startswith("response_format"):
            raise
        raise _placed(error, *wanted[0]) from None


def _placed(error: ApiError, place: str, value: object) -> ApiError:
    text = error.message.removeprefix("response_format").removeprefix(".json_schema.schema")
    kind = place.rpartition(".")[2].removeprefix("guided_")
    for name in (kind, "structural_tag"):
        if text.startswith((f": {name}: ", f": {name}.")):
            text = text.removeprefix(f": {name}")
    tag = _schema(value, place) if isinstance(value, dict | str) and "structural_tag" in error.message else {}
    if "structures" in tag:
        text = _IN_OLDER.sub(r".structures[\1].schema", text)
    return ApiError(place + text, status=error.status, param=place, code=error.code, headers=error.headers)


def _tag_of(wanted: ResponseFormat) -> JsonObject:
    tag: JsonObject = {"type": "structural_tag"}
    for key in ("format", "structures", "triggers"):
        if (value := getattr(wanted, key)) is not None:
            tag[key] = value
    return tag


def _newer(tag: JsonObject, param: str) -> JsonObject:
    """vLLM's older structural tag (`structures` and `triggers`) as xgrammar's: the same, otherwise put."""
    if "structures" not in tag:
        return tag
    structures, triggers = tag["structures"], tag.get("triggers")
    if not (
        isinstance(triggers, list) and triggers and all(isinstance(one, str) and one for one in triggers)
    ):
        raise ApiError(f"{param}.triggers: must be a list of texts", param=param)
    if not isinstance(structures, list) or not structures:
        raise ApiError(f"{param}.structures: must be a list of objects", param=param)
    tags: list[JsonObject] = []
    for index, one in enumerate(structures):
        here = f"{param}.structures[{index}]"
        begin, end = (one.get("begin"), one.get("end")) if isinstance(one, dict) else (None, None)
        if not (isinstance(begin, str) and isinstance(end, str) and isinstance(one.get("schema"), dict)):
            raise ApiError(f"{here}: needs the texts begin and end, and an object schema", param=param)
        if not any(begin.startswith(trigger) for trigger in triggers):
            raise ApiError(f"{here}.begin: must begin with one of the triggers", param=param)
        content = {"type": "json_schema", "json_schema": one["schema"]}
        tags.append({"type": "tag", "begin": begin, "content": content, "end": end})
    form: JsonObject = {"type": "triggered_tags", "triggers": triggers, "tags": tags}
    return {"type": "structural_tag", "format": form}


def _some(value: Value, param: str) -> Value:
    if not value:
        raise ApiError(f"{param}: must not be empty", param=param)
    return value


def _wanted(fields: SamplingFields) -> list[tuple[str, str, object]]:
    """(parameter, kind, value) of each form that is asked for."""
    found: list[tuple[str, str, object]] = []
    given = fields.structured_outputs
    if given is not None:
        for kind in ("json", "json_object", "regex", "choice", "grammar", "structural_tag"):
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
