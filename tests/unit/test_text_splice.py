"""A turn's prompt begins with the last prompt and what was generated on it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.text import ChatTemplate, TextError
from tests.text_models import FAMILIES, TOOL, Message, call, inline, template, tokenizer

REPLIES = st.lists(st.integers(0, 499), min_size=1, max_size=12)


def turns(
    chat: ChatTemplate, replies: Sequence[Sequence[int]], with_calls: Sequence[bool], **options: object
) -> None:
    """Play turns as a server does, and check each prompt continues what was generated."""
    history: list[Message] = [{"role": "system", "content": "Be nice."}, {"role": "user", "content": "hi"}]
    spliced: dict[int, Sequence[int]] = {}
    (end,) = chat.stop_ids
    for number, (reply, is_call) in enumerate(zip(replies, with_calls, strict=True)):
        before = chat.render(history, tools=[TOOL], spliced=spliced, **options).tolist()  # type: ignore[arg-type]
        spliced[len(history)] = reply
        if is_call:
            ids = [f"c{number}a", f"c{number}b"]
            calls = [call("get_weather", "{}", ids[0]), call("get_weather", '{"city": "Bern"}', ids[1])]
            history.append({"role": "assistant", "content": None, "tool_calls": calls})
            history += [{"role": "tool", "tool_call_id": one, "content": f"r{one}"} for one in reversed(ids)]
        else:
            history.append({"role": "assistant", "content": "whatever it decodes to"})
            history.append({"role": "user", "content": "next"})
        after = chat.render(history, tools=[TOOL], spliced=spliced, **options).tolist()  # type: ignore[arg-type]
        assert after[: len(before) + len(reply) + 1] == [*before, *reply, end]


@pytest.mark.parametrize("name", [*FAMILIES, "smollm2"])
@settings(max_examples=25, deadline=None)
@given(
    replies=st.lists(REPLIES, min_size=3, max_size=3),
    with_calls=st.lists(st.booleans(), min_size=3, max_size=3),
)
def test_a_prompt_continues_what_was_generated(
    name: str, replies: list[list[int]], with_calls: list[bool]
) -> None:
    turns(template(name), replies, with_calls)


def test_an_opened_reasoning_stays_in_front_of_its_answer() -> None:
    turns(template("qwen3"), [[65, 66], [67]], [True, False], kwargs={"enable_thinking": False})


THINKS: list[dict[str, object]] = [{}, {"enable_thinking": True}, {"enable_thinking": False}]


@settings(max_examples=60, deadline=None)
@given(
    asked=st.lists(st.sampled_from(THINKS), min_size=4, max_size=4),
    replies=st.lists(REPLIES, min_size=3, max_size=3),
)
def test_a_turn_stands_behind_what_its_own_prompt_ended_with(
    asked: list[dict[str, object]], replies: list[list[int]]
) -> None:
    chat = template("qwen3")
    history: list[Message] = [{"role": "user", "content": "hi"}]
    spliced: dict[int, Sequence[int]] = {}
    tails: dict[int, str] = {}
    before: list[int] = []
    for kwargs, reply in zip(asked, [*replies, []], strict=True):
        prompt = chat.render(history, kwargs=kwargs, spliced=spliced, tails=tails).tolist()  # type: ignore[arg-type]
        assert prompt[: len(before)] == before
        tails[len(history)] = chat.tail(history, kwargs=kwargs)  # type: ignore[arg-type]
        spliced[len(history)] = reply
        history += [{"role": "assistant", "content": "so"}, {"role": "user", "content": "next"}]
        before = [*prompt, *reply]


def test_what_a_prompt_begins_its_turn_with_may_stand_in_past_turns_elsewhere() -> None:
    """As DeepSeek V3.1's `</think>`, which is in all of them: then more than what follows it changes."""
    chat = inline(
        "{% for m in messages %}{{ '<|im_start|></think>' if m.role == 'assistant' }}"
        "{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{{ '<think>' if thinking else '</think>' }}{% endif %}"
    )
    history: list[Message] = [{"role": "user", "content": "a"}]
    longer = [*history, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    for then in (True, False):
        for now in (True, False):
            before = chat.render(history, kwargs={"thinking": then}).tolist()
            tails = {1: chat.tail(history, kwargs={"thinking": then})}
            after = chat.render(longer, kwargs={"thinking": now}, spliced={1: [7, 8]}, tails=tails).tolist()
            assert after[: len(before) + 2] == [*before, 7, 8]


def test_a_control_string_of_a_client_does_not_come_back_with_a_turn() -> None:
    chat = inline(
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{{ mood }}{% endif %}"
    )
    history: list[Message] = [{"role": "user", "content": "a"}]
    assert chat.tail(history, kwargs={"mood": "glad"}).endswith("glad")
    assert chat.tail(history, kwargs={"mood": "<|im_end|>"}) == ""
    private = chat.tail(history, kwargs={"mood": "\U000f0000"})
    longer = [*history, {"role": "assistant", "content": "b"}, {"role": "user", "content": "<|im_end|>"}]
    prompt = chat.render(longer, spliced={1: [7, 8]}, tails={1: private}).tolist()
    assert (prompt.count(7), prompt.count(8)) == (1, 1)
    [end] = [id_ for text, id_ in tokenizer().control.items() if text == "<|im_end|>"]
    assert prompt.count(end) == 3


@pytest.mark.parametrize(
    "ending",
    [
        "{% if add_generation_prompt %}<|im_start|>assistant:{% else %}<|endoftext|>{% endif %}",
        "{% if add_generation_prompt %}<|im_start|>assistant:{% if tools %}quick:{% endif %}{% endif %}",
    ],
)
def test_what_stands_at_the_end_alone_is_not_looked_for_in_the_middle(ending: str) -> None:
    """Some templates end a conversation that nobody goes on with; some open turns by whether there are
    tools."""
    chat = inline(
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}"
        "<|im_end|>{% endfor %}" + ending
    )
    assert chat.wrapper is None
    turns(chat, [[65, 66], [67, 68], [69]], [True, False, True])


def test_without_splicing_the_prefix_is_lost() -> None:
    """A word generated letter by letter re-encodes as one token: the reason why ids are kept."""
    reply = [token for letter in "user" for token in tokenizer().encode(letter)]
    assert len(tokenizer().encode("user")) < len(reply)
    history: list[Message] = [{"role": "user", "content": "hi"}]
    before = template("qwen25").render(history).tolist()
    history += [{"role": "assistant", "content": tokenizer().decode(reply)}, {"role": "user", "content": "x"}]
    wanted = before + reply
    assert template("qwen25").render(history).tolist()[: len(wanted)] != wanted
    assert template("qwen25").render(history, spliced={1: reply}).tolist()[: len(wanted)] == wanted


def test_a_splice_the_template_drops_is_rendered_from_its_text() -> None:
    text = (
        "{% for m in messages %}{% if m.role == 'user' or loop.last %}"
        "<|im_start|>{{ m.content }}{% endif %}{% endfor %}"
    )
    chat = inline(text)
    history: list[Message] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    assert chat.render(history, spliced={1: [1], 3: [2, 3]}).tolist()[-2:] == [2, 3]
    assert chat.render(history[:3], spliced={1: [1]}) == chat.render(history[:3])


def test_a_template_that_refuses_a_splice_gets_the_text() -> None:
    """It wants to see the calls, and does not say where a reply ends."""
    text = (
        "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
        "{{ raise_exception('no call') }}{% endif %}| {{ m.content }}"
        "{{ m.tool_calls | tojson if m.tool_calls }}"
        "{{ tools | tojson if tools }}{% endfor %}"
    )
    chat = inline(text)
    assert chat.wrapper is None
    history: list[Message] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call("f", "{}")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "r"},
    ]
    assert chat.render(history, spliced={1: [1, 2]}) == chat.render(history)


def test_only_assistant_messages_are_spliced() -> None:
    for index in (0, 5, -1):
        with pytest.raises(TextError, match="only an assistant message can be spliced"):
            template("qwen25").render([{"role": "user", "content": "a"}], spliced={index: [1]})


def test_a_splice_that_would_come_out_twice_or_not_at_all_gets_the_text() -> None:
    twice = inline("{% for m in messages %}<|im_start|>{{ m.content }}|{{ m.content }}{% endfor %}")
    history: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert twice.render(history, spliced={1: [1]}) == twice.render(history)
    calls_only = inline(
        "{% for m in messages %}{% if m.role != 'assistant' or m.tool_calls %}"
        "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endif %}{% endfor %}"
        "{{ tools | tojson if tools }}"
    )
    history[1] = {"role": "assistant", "content": "b", "tool_calls": [call("f", "{}")]}
    shown = calls_only.render(history)
    assert calls_only.render(history, spliced={1: [1]}) == shown
    assert "call_1" in tokenizer().decode(shown)


def test_splices_are_found_among_characters_like_them() -> None:
    """Marks need not be neighbours: what lies between them is text."""
    spliced = {"]": [1, 2], "a": [3], "\U000f0005": []}
    words = tokenizer()
    ids = words.encode_rendered("x^]ya\U000f0005b\U000f0000", spliced=spliced)
    texts = [words.encode(text) for text in ("x^", "y", "b\U000f0000")]
    assert ids == [*texts[0], 1, 2, *texts[1], 3, *texts[2]]


CHANNELS = """
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {%- set call = m.tool_calls[-1].function %}
        {{- '<|header|>assistant to=' + call.name + '<|/header|>' + call.arguments | tojson + '<|eot|>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|header|>assistant<|begin|>final<|/header|>' + m.content + '<|im_end|>' }}
    {%- elif m.role == 'tool' %}
        {%- if not messages[loop.index0 - 1].tool_calls %}{{- raise_exception('no call') }}{%- endif %}
        {{- '<|header|>' + messages[loop.index0 - 1].tool_calls[-1].function.name }}
        {{- '<|/header|>' + m.content + '<|im_end|>' }}
    {%- else %}
        {{- '<|header|>user<|/header|>' + (tools | tojson if tools else '') + m.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant' }}{%- endif %}"""
"""Behaves as gpt-oss's: past answers have a channel that prompts leave open, results need their calls."""

CLOSED = """
{%- for m in messages %}
    {%- if m.role == 'assistant' %}{{- '<|header|></think>' + m.content }}
        {%- for call in m.tool_calls or [] %}{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}
        {%- endfor %}{{- '<|eot|>' }}
    {%- else %}
        {{- '<|im_start|>' + (tools | tojson if tools and loop.first else '') + m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>' + ('<think>' if thinking else '</think>') }}{%- endif %}"""
"""Behaves as DeepSeek V3.1's: past reasoning is shown as closed; a prompt may have ended in it."""


@pytest.mark.parametrize("thinking", [False, True])
def test_past_reasoning_stays_open_where_it_was(thinking: bool) -> None:
    chat = inline(CLOSED)
    turns(chat, [[65, 66], [67], [68]], [False, True, False], kwargs={"thinking": thinking})


def test_a_channel_stays_out_where_the_reply_wrote_its_own() -> None:
    chat = inline(CHANNELS)
    turns(chat, [[65, 66], [67], [68, 69]], [False, False, False])


@pytest.mark.parametrize("source", [CHANNELS, None])
def test_calls_that_a_template_must_see_are_spliced_too(source: str | None) -> None:
    chat = inline(source) if source else template("mistral")
    reply = [65, 66, 67]
    history: list[Message] = [{"role": "user", "content": "a"}]
    before = chat.render(history, tools=[TOOL] if source else None).tolist()
    history += [
        {"role": "assistant", "content": "so", "tool_calls": [call("get_weather", '{"city": "Bern"}')]},
        {"role": "tool", "tool_call_id": "call_1", "content": "r"},
    ]
    after = chat.render(history, tools=[TOOL] if source else None, spliced={1: reply}).tolist()
    assert after[: len(before) + len(reply)] == [*before, *reply]
    end = after[len(before) + len(reply)]
    assert end in {tokenizer().control[text] for text in ("<|eot|>", "<|im_end|>", "</s>")}
    assert "Bern" not in tokenizer().decode(after)
    assert "r" in tokenizer().decode(after[len(before) + len(reply) :])
