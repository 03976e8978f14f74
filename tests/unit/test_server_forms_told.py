"""What is wrong about an answer's form or its tools is told in the words of who asked."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api_rig import CHAT, TOOLS, Rig, user
from tests.fakes import ScriptedEngine, say
from tests.messages_rig import MESSAGES, TOOL
from tools_bridge.grammar import ResponseFormat, reply_grammar

RESPONSES = "/v1/responses"
BAD = {"type": "nonsense"}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}


async def told(path: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": [user("a")], "max_tokens": 9, "model": "tiny"}
    if path == RESPONSES:
        body = {"input": "a", "model": "tiny"}
    reply = await Rig(ScriptedEngine(say("ok"))).post(path, body | fields)
    assert reply.status_code == 400, reply.text
    error: dict[str, Any] = reply.json()["error"]
    return error


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"structured_outputs": {"regexx": "a"}}, "structured_outputs.regexx: is not known"),
        (
            {"structured_outputs": {"json": BAD}},
            "structured_outputs.json: type 'nonsense' is not a JSON type",
        ),
        ({"guided_json": BAD}, "guided_json: type 'nonsense' is not a JSON type"),
        (
            {"structured_outputs": {"structural_tag": {"structures": [], "triggers": ["<"]}}},
            "structured_outputs.structural_tag.structures: must be a list of objects",
        ),
        (
            {"response_format": {"type": "structural_tag", "structures": [{}], "triggers": ["<"]}},
            "response_format.structures[0]: needs the texts begin and end, and an object schema",
        ),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": "required"},
            "tool_choice: 'required' needs tools; tools of type 'web_search' were left out, this server does "
            "not run them",
        ),
    ],
)
async def test_of_chat_completions(fields: dict[str, Any], message: str) -> None:
    assert (await told(CHAT, **fields))["message"] == message


TAG = {"type": "structural_tag", "format": {"type": "star", "content": {"json_schema": {"type": "odd"}}}}
OLDER = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"},
        {"begin": "<g>", "schema": {"type": "odd"}, "end": "</g>"},
    ],
    "triggers": ["<"],
}


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"structured_outputs": {"structural_tag": TAG}}, ".structural_tag.format.content.json_schema"),
        ({"response_format": TAG}, ".format.content.json_schema"),
        ({"response_format": OLDER}, ".structures[1].schema"),
        ({"structured_outputs": {"structural_tag": OLDER}}, ".structural_tag.structures[1].schema"),
        (
            {"structured_outputs": {"structural_tag": json.dumps(OLDER)}},
            ".structural_tag.structures[1].schema",
        ),
    ],
)
async def test_schemas_in_structural_tags_are_named_where_they_were_written(
    fields: dict[str, Any], place: str
) -> None:
    rig = Rig(ScriptedEngine(say("ok")))

    def source(form: Any, *rest: Any) -> None:
        reply_grammar(response=ResponseFormat("structural_tag", form.structural_tag))

    rig.grammars.source = source  # type: ignore[method-assign]
    reply = await rig.post(CHAT, {"messages": [user("a")], "model": "tiny"} | fields)
    assert reply.status_code == 400
    [field] = fields
    assert reply.json()["error"]["message"] == f"{field}{place}: 'type' is 'odd': Unsupported type"


async def test_text_completions_name_it_too() -> None:
    reply = await Rig().post("/v1/completions", {"prompt": "a", "guided_json": BAD})
    assert reply.json()["error"]["param"] == "guided_json"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"output_config": {"format": {"type": "json_schema", "schema": BAD}}},
            "output_config.format: type 'nonsense' is not a JSON type",
        ),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema: missing"),
        (
            {"tools": [SEARCH], "tool_choice": {"type": "any"}},
            'tool_choice: {"type": "any"} needs tools; tools of type \'web_search_20250305\' were left out, '
            "this server does not run them",
        ),
    ],
)
async def test_of_messages(fields: dict[str, Any], message: str) -> None:
    assert (await told(MESSAGES, **fields))["message"] == message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"tools": [{"type": "web_search"}], "tool_choice": "required"},
            "tool_choice: 'required' needs tools; tools of type 'web_search' were left out, this server does "
            "not run them",
        ),
        (
            {"text": {"format": {"type": "json_schema", "schema": BAD}}},
            "text.format: type 'nonsense' is not ",
        ),
    ],
)
async def test_of_responses(fields: dict[str, Any], message: str) -> None:
    assert (await told(RESPONSES, **fields))["message"].startswith(message)


class Refusing:
    """No schema of a tool can be held."""

    def source(self, form: Any, prompt_end: str, owner: str = "") -> Any:
        name = form.tools[-1]["function"]["name"]
        raise ValueError(f"tools.{name}.parameters.properties.a: 'contains' cannot be held")


@pytest.mark.parametrize(
    ("path", "tools", "choice", "place"),
    [
        (CHAT, [{"type": "web_search"}, *TOOLS], "required", "tools[2].function.parameters"),
        (MESSAGES, [SEARCH, TOOL], {"type": "any"}, "tools[1].input_schema"),
        (
            RESPONSES,
            [{"type": "web_search"}, {"type": "function", "name": "f", "parameters": {}}],
            "required",
            "tools[1].parameters",
        ),
    ],
)
async def test_a_tool_s_schema_is_where_it_stands(path: str, tools: Any, choice: Any, place: str) -> None:
    rig = Rig(ScriptedEngine(say("ok")))
    rig.context.grammars._maker = Refusing()  # type: ignore[assignment]
    body = {"input": "a"} if path == RESPONSES else {"messages": [user("a")], "max_tokens": 9}
    reply = await rig.post(path, {"model": "tiny", "tools": tools, "tool_choice": choice} | body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["message"] == f"{place}.properties.a: 'contains' cannot be held"


async def test_a_response_that_runs_says_how_to_go_on() -> None:
    rig = Rig(ScriptedEngine(say("slow", hold_at=1)))
    first = (await rig.post(RESPONSES, {"model": "tiny", "input": "a", "background": True})).json()
    body = {"model": "tiny", "input": "b", "previous_response_id": first["id"]}
    reply = await rig.post(RESPONSES, body)
    assert reply.status_code == 409
    assert "send this again when its status" in reply.json()["error"]["message"]
    assert (await rig.post(f"{RESPONSES}/{first['id']}/cancel", {})).status_code == 200


async def test_models_in_the_shape_of_who_asks() -> None:
    rig = Rig(aliases=("alias",))
    headers = {"anthropic-version": "2023-06-01"}
    listed = (await rig.client.get("/v1/models", headers=headers)).json()
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("tiny", "alias", False)
    one = await rig.client.get("/v1/models/alias", headers=headers)
    assert one.json() == listed["data"][1]
    assert one.json()["type"] == "model"
    assert one.json()["display_name"] == "alias"
    assert one.json()["created_at"].endswith("Z")
    assert one.headers["request-id"] == one.headers["x-request-id"]
    missing = (await rig.client.get("/v1/models/other", headers=headers)).json()
    assert missing["error"]["type"] == "not_found_error"
    assert (await rig.client.get("/v1/models")).json()["object"] == "list"
