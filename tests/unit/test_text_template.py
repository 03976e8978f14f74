"""Chat templates give the ids of `transformers`."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text_models import (
    FAMILIES,
    TODAY,
    TOOL,
    Message,
    call,
    inline,
    smollm2_tokenizer,
    source,
    template,
    theirs,
    tokenizer,
)


def expected(text: str, messages: Sequence[Message], **options: object) -> list[int]:
    """What `transformers` makes of it; it wants arguments as objects."""
    history = copy.deepcopy(list(messages))
    for message in history:
        for item in message.get("tool_calls") or []:  # type: ignore[attr-defined]
            item["function"]["arguments"] = json.loads(item["function"]["arguments"])
    options.setdefault("add_generation_prompt", True)
    if "strftime_now" in text:
        options["date_string"] = TODAY.strftime("%d %b %Y")
    return theirs().apply_chat_template(
        history, chat_template=text, tokenize=True, return_dict=False, **options
    )


WORD = st.sampled_from(
    ["Hello", " world", "\n", "  ", "12", "é", "👍", "{", '"', "\\", "'", "a|b", "You", ":", "nice."]
)
TEXT = st.lists(WORD, max_size=8).map("".join)
JSON_VALUE = st.recursive(
    TEXT | st.integers(-5, 10**12) | st.booleans() | st.none() | st.floats(-10, 10),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)


@st.composite
def histories(draw: st.DrawFn) -> list[Message]:
    """Benign conversations: system, user turns, answers, calls with their results."""
    history: list[Message] = []
    if draw(st.booleans()):
        history.append({"role": "system", "content": draw(TEXT)})
    for turn in range(draw(st.integers(1, 3))):
        history.append({"role": "user", "content": draw(TEXT)})
        if draw(st.booleans()):
            arguments = draw(st.dictionaries(TEXT, JSON_VALUE, max_size=2))
            one = call("get_weather", json.dumps(arguments, ensure_ascii=draw(st.booleans())), f"call_{turn}")
            history.append(
                {"role": "assistant", "content": draw(st.sampled_from([None, ""])), "tool_calls": [one]}
            )
            history.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": draw(TEXT)})
        if turn == 0 or draw(st.booleans()):
            history.append({"role": "assistant", "content": draw(TEXT)})
    return history


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=80, deadline=None)
@given(history=histories(), with_tools=st.booleans(), prompt=st.booleans())
def test_ids_equal_apply_chat_template(
    name: str, history: list[Message], with_tools: bool, prompt: bool
) -> None:
    tools = [TOOL] if with_tools else None
    ours = template(name).render(history, tools=tools, add_generation_prompt=prompt)
    wanted = expected(source(name), history, tools=tools, add_generation_prompt=prompt)
    assert ours.tolist() == wanted
    assert ours.typecode == "i"
    assert ours.itemsize == 4


@pytest.mark.model
@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(TEXT, min_size=1, max_size=5),
    system=st.none() | TEXT,
)
def test_smollm2_equals_its_own_template(texts: list[str], system: str | None) -> None:
    """SmolLM2's template is simple enough to say in a line what it renders."""
    history: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    history += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    first = (
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face" if system is None else system
    )
    body = [("system", first), *((("user", "assistant")[i % 2], text) for i, text in enumerate(texts))]
    wanted = smollm2_tokenizer().encode_rendered(
        "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in body) + "<|im_start|>assistant\n"
    )
    assert template("smollm2").render(history).tolist() == wanted


def test_kwargs_reach_the_template() -> None:
    history: list[Message] = [{"role": "user", "content": "hi"}]
    ours = template("qwen3").render(history, kwargs={"enable_thinking": False})
    assert ours.tolist() == expected(source("qwen3"), history, enable_thinking=False)
    assert ours.tolist() != template("qwen3").render(history).tolist()


def test_past_reasoning_is_dropped_as_the_template_does() -> None:
    answer = "<think>\nSo,\nhm.\n</think>\n\nFine."
    history: list[Message] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": answer},
    ]
    for end in (3, 4):
        assert template("qwen3").render(history[:end]).tolist() == expected(source("qwen3"), history[:end])


def test_continue_final_message() -> None:
    history: list[Message] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello wor"},
    ]
    for name in FAMILIES:
        ours = template(name).render(history, add_generation_prompt=False, continue_final_message=True)
        wanted = expected(source(name), history, add_generation_prompt=False, continue_final_message=True)
        assert ours.tolist() == wanted


def test_list_content_is_passed_on_where_the_template_reads_it() -> None:
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "world"}]
    history: list[Message] = [{"role": "user", "content": parts}]
    lists = template("lists")
    assert lists.facts is not None
    assert lists.facts.list_content
    assert lists.render(history).tolist() == expected(source("lists"), history)
    flat = template("qwen25").render(history).tolist()
    assert flat == template("qwen25").render([{"role": "user", "content": "Hello \nworld"}]).tolist()


def test_blocks_on_lines_of_their_own_leave_no_trace() -> None:
    """trim_blocks, lstrip_blocks, break and continue, as `transformers` has them."""
    text = (
        "{% for m in messages %}\n"
        "    {% if m.role == 'system' %}\n"
        "        {% continue %}\n"
        "    {% endif %}\n"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "    {% if loop.index0 == 2 %}\n"
        "        {% break %}\n"
        "    {% endif %}\n"
        "{% endfor %}\n"
        "{% generation %}\nend{% endgeneration %}\n"
    )
    history: list[Message] = [{"role": "user", "content": f"m{number}"} for number in range(5)]
    history.insert(1, {"role": "system", "content": "x"})
    ours = inline(text).render(history)
    assert ours.tolist() == expected(text, history)
    assert tokenizer().decode(ours) == "user\nm0\nuser\nm1\nend"
