"""Broken conversations and templates are refused in one line."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.text import TextError
from agentserve.text.conversation import openai_shape, parse_messages
from tests.text_models import Message, call, deep_json, inline, prompt_text, template

GOOD: Message = {"role": "user", "content": "a"}
DEEP = deep_json(100)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "robot", "content": "x"}, "unknown role 'robot'"),
        ({"content": "x"}, "unknown role"),
        ("text", "an object is expected"),
        ({"role": "user"}, "a user message needs content"),
        ({"role": "user", "content": 3}, "content must be a string"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "'image_url' is not supported",
        ),
        ({"role": "user", "content": ["x"]}, "not supported"),
        ({"role": "tool", "content": [{"type": "hologram"}]}, "'hologram' is not supported"),
        ({"role": "tool", "content": [{"type": ["image"]}]}, "not supported"),
        ({"role": "assistant", "content": [{"type": "image_url"}]}, "'image_url' is not supported"),
        ({"role": "tool", "content": "x"}, "tool_call_id: missing"),
        ({"role": "user", "content": "x", "tool_calls": [call("f", "{}")]}, "only an assistant"),
        ({"role": "assistant", "tool_calls": "x"}, "must be a list"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "a function with a name"),
        ({"role": "assistant", "tool_calls": [call("f", "{broken")]}, "not valid JSON"),
        ({"role": "assistant", "tool_calls": [call("f", "[1]")]}, "must be a JSON object"),
        ({"role": "assistant", "tool_calls": [call("f", '{"a": NaN}')]}, "not valid JSON"),
        ({"role": "assistant", "tool_calls": [call("f", '{"a": 1e999}')]}, "not valid JSON"),
        ({"role": "assistant", "tool_calls": [call("f", "[" * 100_000)]}, "not valid JSON"),
        ({"role": "assistant", "tool_calls": [call("f", {"a": DEEP})]}, "nested deeper"),
        ({"role": "assistant", "tool_calls": [call("f", {"a": float("inf")})]}, "finite"),
        ({"role": "assistant", "tool_calls": [call("f", {"a": {1}})]}, "is not JSON"),
        ({"role": "assistant", "tool_calls": [call("f", '{"a": "\\ud800"}')]}, "surrogate"),
        ({"role": "assistant", "tool_calls": [call("f", "{}") | {"type": "custom"}]}, "only 'function'"),
    ],
)
def test_a_broken_message_is_named(message: Message, words: str) -> None:
    with pytest.raises(TextError, match=words) as caught:
        template("qwen25").render([GOOD, message, GOOD])
    assert caught.value.param is not None
    assert caught.value.param.startswith("messages[1]")
    assert str(caught.value).startswith(caught.value.param)
    assert "\n" not in str(caught.value)


def test_other_broken_requests() -> None:
    chat = template("qwen25")
    with pytest.raises(TextError, match="at least one message"):
        chat.render([])
    with pytest.raises(TextError, match=r"tools\[0\]: nested deeper"):
        chat.render([GOOD], tools=[{"x": DEEP}])
    with pytest.raises(TextError, match="exclude each other"):
        chat.render([GOOD], continue_final_message=True)
    with pytest.raises(TextError, match="must be an assistant's"):
        chat.render([GOOD], continue_final_message=True, add_generation_prompt=False)
    with pytest.raises(TextError, match=r"messages\[0\].tool_call_id: a tool result that follows no"):
        chat.render([{"role": "tool", "content": "x", "tool_call_id": "c"}])
    with pytest.raises(TextError, match="surrogate"):
        chat.render([{"role": "user", "content": "\ud800"}])


def test_the_shape_clients_write_is_one_shape() -> None:
    """Whatever form a client chose, what is rendered and digested afterwards is the same."""
    loose: list[Message] = [
        {"role": "user", "content": [{"text": "a"}, {"type": "text", "text": ""}]},
        {"role": "assistant", "content": "", "reasoning": "hm", "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "tool", "content": "r", "tool_call_id": None},
    ]
    parsed = parse_messages(loose)
    shaped = [openai_shape(message) for message in parsed]
    assert shaped == [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call("f", "{}", "")],
            "reasoning_content": "hm",
        },
        {"role": "tool", "content": "r", "tool_call_id": ""},
    ]
    assert parse_messages(shaped) == parsed
    two: list[Message] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ]
    assert [openai_shape(message) for message in parse_messages(two)] == two


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{% if %}", "line 1"),
        ("{{ raise_exception('never\nmind') }}", "never mind"),
        ("{{ messages[0].content.__class__.__mro__ }}", "chat template"),
        ("{{ messages.append(1) }}{{ messages[0].content }}", "chat template"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "chat template"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "nested too deeply"),
        ("nothing", "does not render a user message"),
    ],
)
def test_a_template_that_cannot_be_used(text: str, words: str) -> None:
    with pytest.raises(TextError, match=words) as caught:
        inline(text)
    assert "\n" not in str(caught.value)


def test_running_out_of_placeholders_is_an_error() -> None:
    private = "".join(map(chr, [*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE)]))
    assert private in prompt_text(template("qwen25"), [{"role": "user", "content": private}])
    with pytest.raises(TextError, match="private-use"):
        template("qwen25").render([{"role": "user", "content": private + "<|im_end|>"}])


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=3) | st.just("{}"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "id", "function", "name", "arguments"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)
FIELDS = {
    "content": ANYTHING,
    "tool_calls": ANYTHING,
    "tool_call_id": ANYTHING,
    "name": ANYTHING,
    "reasoning_content": ANYTHING,
}
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool", "robot", None, 3])


@settings(max_examples=300, deadline=None)
@given(
    messages=st.lists(st.fixed_dictionaries({"role": ROLES}, optional=FIELDS) | ANYTHING, max_size=3),
    tools=st.none() | st.lists(ANYTHING, max_size=2),
    kwargs=st.none() | st.dictionaries(st.text(max_size=3), ANYTHING, max_size=2),
)
def test_whatever_comes_in_the_answer_is_ids_or_a_text_error(
    messages: list[object], tools: list[object] | None, kwargs: dict[str, object] | None
) -> None:
    for name in ("qwen25", "lists"):
        with suppress(TextError):
            ids = template(name).render(messages, tools=tools, kwargs=kwargs)  # type: ignore[arg-type]
            assert len(ids) > 0
