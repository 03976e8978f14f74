"""Bad input: a clear 400 that names the parameter, and nothing is left behind."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from agentserve.server.errors import ApiError
from agentserve.server.http.completions import _prompts
from agentserve.server.http.history import message_dicts, tool_dicts
from agentserve.server.http.schemas import FunctionDef, ToolDef
from agentserve.server.limits import Limits
from tests.api_rig import CHAT, TOOLS, Rig, hermes, user
from tests.fakes import ByteTokenizer, ScriptedEngine, say

HUGE = 10**30
CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}


def asked(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def result(call: str | None, text: str = "r") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": text}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 5_000_000}, "n"),
        ({"n": HUGE}, "n"),
        ({"n": "1"}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e9}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"seed": 2**70}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": HUGE}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_tokens"),
        ({"min_tokens": HUGE}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 10**9}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x"] * 100_000}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop_token_ids": [259]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [2**40]}, "stop_token_ids"),
        ({"logit_bias": {"259": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
        ({"priority": HUGE}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 1000}, "cache_salt"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        *(
            ({"tools": [{"type": "function", "function": {"name": name}}]}, "tools[0].function.name")
            for name in ("", "a b", "a/b", "n\u00e4me", "a\n", "x" * 129)
        ),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
        ({"tools": TOOLS[:1] * 300}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required"}}},
            "tool_choice",
        ),
        ({"reasoning_effort": "very much"}, "reasoning_effort"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {}}, "guided_json": {}}, "guided_json"),
        ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}] * 10_001}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ],
)
async def test_a_value_out_of_range_names_its_parameter(fields: dict[str, Any], param: str) -> None:
    rig = Rig(ScriptedEngine())
    reply = await rig.post(CHAT, {"messages": [user("a")]} | fields)
    error = reply.json()["error"]
    assert reply.status_code == 400, reply.text
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert len(error["message"]) < 1000
    assert "\n" not in error["message"]
    assert not rig.engine.submits
    assert len(rig.context.directory) == 0


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([user("a"), asked(CALL), result("c2")], "messages[2]"),
        ([user("a"), asked(CALL), result(None), result(None)], "messages[2]"),
        ([user("a"), asked(CALL), result("c1"), result("c1")], "messages[3]"),
        ([user("a"), asked(CALL, CALL | {"id": "c2"}), result("c1")], "messages[1]"),
        ([user("a"), asked(CALL, CALL), result("c1")], "messages[1]"),
        ([user("a"), asked(CALL, CALL | {"id": "c2"}), result(None), result("c1")], "messages[2]"),
        ([user("a"), result("c1")], "messages[1]"),
        ([user("a"), asked(CALL), user("b"), result("c1")], "messages[3]"),
        (
            [user("a"), asked(CALL | {"function": {"name": "now", "arguments": [1]}})],
            "messages[1].tool_calls[0]",
        ),
        ([user("a"), asked(CALL | {"type": "custom"})], "messages[1].tool_calls[0]"),
        ([user("a"), asked(CALL | {"id": ["c1"]})], "messages[1].tool_calls[0]"),
        ([user("a"), asked(CALL), {"role": "tool", "tool_call_id": {}, "content": "r"}], "messages[2]"),
    ],
)
async def test_a_broken_tool_history_names_the_message(messages: list[dict[str, Any]], where: str) -> None:
    rig = Rig()
    reply = await rig.post(CHAT, {"messages": messages, "tools": TOOLS})
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert error["param"].startswith(where)
    assert error["message"].startswith(where)
    assert not rig.engine.submits


@pytest.mark.parametrize("arguments", ["{}", "", "  ", None, "null", {}])
async def test_every_way_to_say_no_arguments_is_one_prompt(arguments: Any) -> None:
    rig = Rig()
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": arguments}}
    await rig.chat([user("a"), asked(call), result("c1")], tools=TOOLS)
    plain = Rig()
    await plain.chat([user("a"), asked(CALL), result("c1")], tools=TOOLS)
    assert rig.engine.submits[0].tokens == plain.engine.submits[0].tokens


async def test_a_single_result_without_an_id_answers_the_single_call() -> None:
    rig = Rig()
    await rig.chat([user("a"), asked(CALL), result(None)], tools=TOOLS)
    assert len(rig.engine.submits) == 1


async def test_calls_without_any_result_leave_the_session_usable() -> None:
    rig = Rig(ScriptedEngine(say(hermes("now", "{}"))))
    first = await rig.chat([user("a")], tools=TOOLS)
    message = first["choices"][0]["message"]
    history = [user("a"), message, user("never mind")]
    reply = await rig.post(CHAT, {"messages": history, "tools": TOOLS})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "missing_tool_result")
    assert (await rig.session(first["session_id"]))["state"] == "WAITING_TOOL"
    history.insert(2, result(message["tool_calls"][0]["id"], "cancelled"))
    again = await rig.chat(history, tools=TOOLS)
    assert again["session_id"] == first["session_id"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: must be at least 1, got 0"),
        ({"max_tokens": 2**63}, f"max_tokens: must fit into 64 bits, got {2**63}"),
        ({"seed": -(2**64)}, f"seed: must fit into 64 bits, got {-(2**64)}"),
        ({"n": 0}, "n: must be between 1 and 128, got 0"),
    ],
)
async def test_a_range_is_told_in_words_of_use(fields: dict[str, Any], message: str) -> None:
    reply = await Rig().post(CHAT, {"messages": [user("a")]} | fields)
    assert reply.json()["error"]["message"] == message


async def test_unknown_fields_and_parts_of_clients_are_ignored() -> None:
    rig = Rig()
    await rig.chat(
        [{"role": "user", "content": [{"type": "text", "text": "a"}], "weird": 1}],
        store=True,
        metadata={"a": "b"},
        service_tier="auto",
        verbosity="low",
        prediction={"type": "content"},
        safety_identifier=["x"],
        user={"not": "text"},
        reasoning_effort="high",
        functions=[],
        function_call="auto",
        nvext=["x"],
        vllm_xargs="x",
    )
    assert len(rig.engine.submits) == 1


async def test_parts_of_other_kinds_have_a_code_of_their_own() -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    reply = await Rig().post(CHAT, {"messages": [user("a"), image]})
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_content", "messages[1].content[0].type")


LONGEST = max(map(len, ByteTokenizer.token_bytes))


def called(name: str) -> list[dict[str, Any]]:
    call = {"id": "c", "function": {"name": name, "arguments": "{}"}}
    return [user("a"), {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "b"}]


def described(text: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "description": text}}]


class Untouched(ByteTokenizer):
    """A tokenizer that must not be asked."""

    def encode(self, text: str) -> list[int]:
        raise AssertionError("a text that cannot fit was encoded")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, lambda text: {"messages": [user(text)]}, "messages"),
        (CHAT, lambda text: {"messages": [user(text[:500]), user(text[500:])]}, "messages"),
        ("/tokenize", lambda text: {"messages": [user(text)]}, "messages"),
        (CHAT, lambda text: {"messages": called(text)}, "messages"),
        (CHAT, lambda text: {"messages": [user("a")], "tools": described(text)}, "tools"),
        ("/tokenize", lambda text: {"messages": [user("a")], "tools": described(text)}, "tools"),
        ("/tokenize", lambda text: {"prompt": text}, "prompt"),
        ("/v1/completions", lambda text: {"prompt": text}, "prompt"),
        ("/v1/completions", lambda text: {"prompt": [text]}, "prompt"),
    ],
)
async def test_a_text_that_cannot_fit_is_refused_unencoded(path: str, body: Any, param: str) -> None:
    """The longest token says how many bytes a full context can hold."""
    rig = Rig(ScriptedEngine(max_model_len=128))
    most = 128 * LONGEST
    object.__setattr__(rig.context, "tokenizer", Untouched())
    for text in ("x" * (most + 1), "é" * (most // 2 + 1)):
        reply = await rig.post(path, body(text))
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["param"] == param
        assert "bytes" in error["message"]  # not the count of tokens, which takes encoding
    assert not rig.engine.submits


def test_what_templates_may_drop_does_not_count() -> None:
    limits = Limits(prompt_bytes=10)
    history = [user("a" + " " * 20), {"role": "assistant", "content": "<think>" + "x" * 20 + "</think>ok"}]
    assert len(message_dicts(history, limits)) == 2
    late = FunctionDef("f", description="x" * 20)
    assert len(tool_dicts([ToolDef(function=late, defer_loading=True)], limits)) == 1
    with pytest.raises(ApiError, match="13 bytes"):
        message_dicts([*history, user("y" * 10)], limits)


@pytest.mark.parametrize("blank", [" ", "\n", "\u2003"])
async def test_white_space_without_end_is_refused_unencoded(blank: str) -> None:
    rig = Rig(ScriptedEngine(max_model_len=128))
    object.__setattr__(rig.context, "tokenizer", Untouched())
    for path, body in (
        (CHAT, {"messages": [user("x" + blank * 200_000)]}),
        ("/v1/completions", {"prompt": blank * 200_000}),
    ):
        reply = await rig.post(path, body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["a"] * 250_000},
        {"prompt": "x", "nvext": {f"k{i}": 1 for i in range(250_000)}},
        {"prompt": ["\\" + '"'] * 250_000},
    ],
)
async def test_a_body_of_too_many_strings_is_not_decoded(body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it was decoded")

    monkeypatch.setattr(msgspec.json, "decode", never)
    reply = await Rig().post("/v1/completions", body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "json_too_large")


class Counted(list[Any]):
    """Counts the looks at its items."""

    looks = 0

    def __iter__(self) -> Any:
        for item in super().__iter__():
            self.looks += 1
            yield item


@pytest.mark.parametrize(
    ("item", "words"), [(1, "maximum context length"), ("a", "at most 4 prompts"), ([1], "at most 4 prompts")]
)
def test_lengths_are_checked_before_items(item: Any, words: str) -> None:
    prompt = Counted([item] * 1000)
    with pytest.raises(ApiError, match=words):
        _prompts(prompt, Limits(prompts=4), 100)
    assert prompt.looks == 0


async def test_a_prompt_of_ids_is_measured_before_its_ids() -> None:
    reply = await Rig().post("/v1/completions", {"prompt": [[1], [300] * 4096]})
    assert reply.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"model": "m" * 100_000, "messages": [user("a")]}),
        (CHAT, {"messages": [user("a")], "tools": [{"type": "t" * 100_000}], "tool_choice": "any"}),
        (
            CHAT,
            {"messages": [user("a")], "tool_choice": "c" * 100_000},
        ),
        ("/v1/completions", {"prompt": [10**1000]}),
        ("/detokenize", {"tokens": [10**1000]}),
    ],
)
async def test_errors_do_not_echo_at_length(path: str, body: Any) -> None:
    reply = await Rig().post(path, body)
    assert reply.status_code in (400, 404)
    assert len(reply.content) < 800


def test_long_messages_and_parameters_are_clipped() -> None:
    error = ApiError("m" * 301, param="p" * 1000).body()["error"]
    assert error["message"] == "m" * 297 + "..."  # type: ignore[index]
    assert error["param"] == "p" * 297 + "..."  # type: ignore[index]
    assert ApiError("m" * 300).message == "m" * 300
