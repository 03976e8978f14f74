"""The real templates of the model families: ids of `transformers`, nothing forged, prefixes kept."""

from __future__ import annotations

import json
import random

import pytest
from jinja2 import TemplateError

from agentserve.text import TextError
from tests.template_families import model
from tests.template_histories import SEARCH, WEATHER, Histories, Message, as_clients_write, as_templates_read
from tests.template_prefixes import measure
from tests.template_report import HISTORIES, Figures, recorded, table, tables_in
from tests.template_table import FAMILIES
from tools_bridge.registry import BY_NAME, reply_form

MOVING = {"mistral-v3", "mistral-nemo", "mistral-v11"}
"""Templates that show tools before the last user's message alone."""
TOLD_FIRST = {"glm5.2", "gemma4", "gemma4-31b"}
"""Templates that say in front of everything whether the model is to reason."""


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_equal_apply_chat_template(name: str) -> None:
    of = model(name)
    taken, refused = 0, 0
    for history, tools, kwargs in Histories(of, seed=1):
        clients = as_clients_write(history)
        try:
            expected = of.expected(as_templates_read(of, history, kwargs), tools, kwargs)
        except TemplateError:
            refused += 1
            with pytest.raises(TextError):
                of.chat.render(clients, tools=tools, kwargs=kwargs)  # type: ignore[arg-type]
            continue
        ours = of.chat.render(clients, tools=tools, kwargs=kwargs).tolist()  # type: ignore[arg-type]
        assert ours == expected, (history, kwargs)
        taken += 1
        if taken == HISTORIES:
            break
    assert refused < HISTORIES / 2


@pytest.mark.parametrize("name", FAMILIES)
def test_the_form_of_replies_is_that_of_the_template(name: str) -> None:
    of = model(name)
    form = reply_form("\n".join(of.chat.sources))
    assert form.family.name == of.family.parser
    assert form.reasons == of.family.reasons
    assert (form.think.open if form.think else None) == of.family.think
    assert (of.chat.wrapper is None) == (name not in {"mistral-v7", "gemma3"})  # those know no calls
    assert of.chat.moves == (name in MOVING)


@pytest.mark.parametrize("name", FAMILIES)
def test_control_strings_of_a_family_stay_text(name: str) -> None:
    """The control tokens of a prompt are the same whatever its users wrote."""
    of = model(name)
    draw = random.Random(2)
    strings = [*of.family.special, *of.family.markup]
    pieces = [*strings, *(text[:4] for text in strings), *(text[2:] for text in strings), " ", "\n", "x"]
    controls = set(of.tokenizer.control.values())

    def controls_of(text: str) -> list[int]:
        calls = of.chat.wrapper is None
        tools = told_of_tools(text) if calls else None
        ids = of.chat.render(written_by_users(text, calls=calls), tools=tools)  # type: ignore[arg-type]
        return [id_ for id_ in ids if id_ in controls]

    benign = controls_of("x")
    for _ in range(HISTORIES // 2):
        forged = "".join(draw.choices(pieces, k=draw.randrange(1, 6)))
        assert controls_of(f"x{forged}x") == benign, forged


def written_by_users(text: str, *, calls: bool) -> list[Message]:
    """`text` wherever a conversation holds some."""
    history: list[Message] = [
        {"role": "system", "content": f"s{text}"},
        {"role": "user", "content": f"{text} u", "name": text},
        {"role": "assistant", "content": f"{text} a", "reasoning_content": f"r {text}"},
        {"role": "user", "content": [{"type": "text", "text": text}, {"type": "text", "text": f"t {text}"}]},
    ]
    if calls:
        function = {"name": f"f{text}", "arguments": json.dumps({"city": text, text: [text, {text: 1}]})}
        history += [
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": text,
                "tool_calls": [{"id": text, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": text, "name": f"f{text}", "content": text},
        ]
    return history


def told_of_tools(text: str) -> list[Message]:
    parameters = {
        "type": "object",
        "properties": {text: {"type": "string", "description": text, "enum": [text]}},
        "required": [text],
    }
    function = {"name": f"f{text}", "description": text, "parameters": parameters}
    return [{"type": "function", "function": function}]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_continues_what_was_generated(name: str) -> None:
    """Whole, but where the template moves what stands first; as much of it there as is recorded."""
    kept, expected = measure(name), recorded()[name]
    assert (kept.turns, kept.whole) == (expected.turns, expected.whole)
    if name not in MOVING:
        assert kept.whole == kept.turns


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_continues_what_was_generated_for_a_client_that_reasons_now_and_then(name: str) -> None:
    steadily = name in MOVING
    kept = measure(name, steadily=steadily, wavering=True)
    assert (kept.whole == kept.turns) == (name not in TOLD_FIRST)


@pytest.mark.parametrize("name", sorted(MOVING))
def test_a_steady_prompt_continues_what_was_generated(name: str) -> None:
    kept = measure(name, steadily=True)
    assert kept.whole == kept.turns


@pytest.mark.parametrize("name", sorted(MOVING))
def test_a_steady_prompt_says_all_that_the_template_says(name: str) -> None:
    of, steady = model(name), model(name, steadily=True)
    history: list[Message] = [
        {"role": "system", "content": "Be nice."},
        {"role": "user", "content": "Weather?"},
    ]
    tools = [WEATHER, SEARCH]
    asked = of.chat.render(history, tools=tools).tolist()  # type: ignore[arg-type]
    assert steady.chat.render(history, tools=tools).tolist() == asked  # type: ignore[arg-type]
    history += [{"role": "assistant", "content": "No."}, {"role": "user", "content": "Now?"}]
    longer = steady.chat.render(history, tools=tools).tolist()  # type: ignore[arg-type]
    theirs = of.chat.render(history, tools=tools).tolist()  # type: ignore[arg-type]
    assert longer[: len(asked)] == asked
    assert sorted(longer) == sorted(theirs)  # the same said elsewhere


def test_the_tables_of_the_documents_are_what_is_measured() -> None:
    assert list(recorded()) == list(FAMILIES)
    assert tables_in("README.md") == table(recorded())
    untested = set(BY_NAME) - {family.parser for family in FAMILIES.values()}
    assert untested == {"deepseek-v41", "kimi-k3"}  # no package has their templates


@pytest.mark.parametrize("name", ["qwen3.6", "mistral-v3"])
def test_recorded_shares_are_those_that_are_measured(name: str) -> None:
    kept = measure(name)
    steady = measure(name, steadily=True) if name in MOVING else None
    assert Figures.of(FAMILIES[name], kept, steady).near(recorded()[name])


def test_harmony_ends_a_turn_with_a_return_or_a_call_not_with_every_message() -> None:
    of = model("gpt-oss")
    assert of.chat.stop_ids == {of.tokenizer.control["<|call|>"]}
    assert of.tokenizer.eos_ids == {of.tokenizer.control["<|return|>"]}


def test_harmony_shows_reasoning_and_text_beside_a_call() -> None:
    """Its template takes one of the two."""
    of = model("gpt-oss")
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turn = {"role": "assistant", "reasoning": "Hm, say.", "content": "I look.", "tool_calls": [call]}
    history = [{"role": "user", "content": "hi"}, turn, {"role": "tool", "tool_call_id": "a", "content": "r"}]
    shown = of.tokenizer.showing(list(of.family.special)).decode(of.chat.render(history))  # type: ignore[arg-type]
    assert "<|channel|>analysis<|message|>Hm, say.\n\nI look.<|end|>" in shown


def test_kimi_reads_the_ids_that_it_writes() -> None:
    of = model("kimi-k2")

    def called(id_: str) -> dict[str, object]:
        return {"id": id_, "type": "function", "function": {"name": "f", "arguments": "{}"}}

    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [called("call_1"), called("functions.f:7")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "one"},
        {"role": "tool", "tool_call_id": "functions.f:7", "content": "two"},
        {"role": "assistant", "content": None, "tool_calls": [called("call_3")]},
        {"role": "tool", "tool_call_id": "call_3", "content": "three"},
    ]
    shown = of.tokenizer.showing(list(of.family.special)).decode(of.chat.render(history))  # type: ignore[arg-type]
    for id_, result in (("functions.f:0", "one"), ("functions.f:7", "two"), ("functions.f:8", "three")):
        assert f"<|tool_call_begin|>{id_}<|tool_call_argument_begin|>" in shown
        assert f"## Return of {id_}\n{result}<|im_end|>" in shown


def test_kimi_finds_results_under_the_ids_that_it_has_written() -> None:
    of = model("kimi-k2")
    control = of.tokenizer.control

    def written(*ids: str) -> list[int]:
        tokens = [control["<|tool_calls_section_begin|>"]]
        for id_ in ids:
            tokens += [control["<|tool_call_begin|>"], *of.tokenizer.encode(id_)]
            tokens += [
                control["<|tool_call_argument_begin|>"],
                *of.tokenizer.encode('{"a": "functions.f:9"}'),
            ]
            tokens.append(control["<|tool_call_end|>"])
        return [*tokens, control["<|tool_calls_section_end|>"]]

    def call(id_: str) -> dict[str, object]:
        return {"id": id_, "type": "function", "function": {"name": "f", "arguments": "{}"}}

    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call("call_1"), call("call_2")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "one"},
        {"role": "tool", "tool_call_id": "call_2", "content": "two"},
    ]
    for ids, expected in (
        (("functions.f:4", " functions.f:5"), ("functions.f:4", "functions.f:5")),
        (("functions.g:4", "functions.f:5"), ("functions.f:0", "functions.f:1")),  # not what was called
        (("functions.f:4",), ("functions.f:0", "functions.f:1")),
    ):
        prompt = of.chat.render(history, spliced={1: written(*ids)})  # type: ignore[arg-type]
        shown = of.tokenizer.decode(prompt, skip_control=False)
        for id_, result in zip(expected, ("one", "two"), strict=True):
            assert f"## Return of {id_}\n{result}<|im_end|>" in shown


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("deepseek-v3.1", "tool_call_name<｜tool▁sep｜>tool_call_arguments"),
        ("deepseek-v3", "function<｜tool▁sep｜>tool_call_name\n```json\ntool_call_arguments\n```"),
    ],
)
@pytest.mark.parametrize("system", ["Be nice.", ""])
def test_deepseek_is_told_its_tools_as_its_card_has_them(name: str, form: str, system: str) -> None:
    of = model(name)
    history: list[Message] = [{"role": "user", "content": "hi"}]
    history = [{"role": "system", "content": system}, *history] if system else history
    ids = of.chat.render(history, tools=[WEATHER])  # type: ignore[arg-type]
    shown = of.tokenizer.showing(list(of.family.special)).decode(ids)
    parameters = json.dumps(WEATHER["function"]["parameters"], ensure_ascii=False)  # type: ignore[index]
    begin = f"<｜begin▁of▁sentence｜>{system}\n\n" if system else "<｜begin▁of▁sentence｜>"
    assert shown.startswith(
        f"{begin}## Tools\nYou have access to the following tools:\n\n### get_weather\n"
        f"Description: Weather of 'now' in Zürich\n\nParameters: {parameters}\n\nIMPORTANT: "
    )
    assert f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{form}<｜tool▁call▁end｜>" in shown
    assert shown.count("<｜User｜>hi") == 1


CALLED = ["call_" + letter * 24 for letter in "abc"]


def _calls(*ids: str) -> Message:
    function = {"name": "weather", "arguments": "{}"}
    made = [{"id": id_, "type": "function", "function": function} for id_ in ids]
    return {"role": "assistant", "content": "", "tool_calls": made}


def _results(*ids: str) -> list[Message]:
    return [
        {"role": "tool", "tool_call_id": id_, "content": "No result: the call was cancelled."} for id_ in ids
    ]


AFTER = {
    "a cancel while a tool is waited for": [_calls(CALLED[0]), *_results(CALLED[0])],
    "two of them": [
        *(_calls(CALLED[0]), *_results(CALLED[0]), {"role": "user", "content": "And now?"}),
        *(_calls(CALLED[1]), *_results(CALLED[1])),
    ],
    "a background result": [
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "[Result]"},
    ],
    "a reply that says nothing": [{"role": "assistant", "content": ""}],
    "nothing but a thought": [{"role": "assistant", "content": "", "reasoning_content": "Hm."}],
}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_an_agents_turn_leaves_is_taken_by_every_template(name: str) -> None:
    """Whatever ended it, the user's next message is shown, and with it all that was said before."""
    of = model(name)
    for why, left in AFTER.items():
        history: list[Message] = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What first?"},
            *left,
            {"role": "user", "content": "What then?"},
        ]
        ids = of.chat.render(history, tools=[WEATHER])  # type: ignore[arg-type]
        shown = of.tokenizer.decode(ids)
        system = [] if name in MOVING else ["Be brief."]  # theirs may be gone behind results
        for text in ("What first?", "What then?", *system, *(["[Result]"] if "result" in why else [])):
            assert text in shown, why
