"""What a model's template tells of its replies: the tokens that are shown, and those that end a turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentserve.server.workers.vocabulary import shown_bytes
from agentserve.text import TextModel, load
from tests.text_models import save_model

CONTROL = ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|call|>", "<|return|>", "[TOOL_CALLS]")
CHANNELS = """
{%- for m in messages %}
    {{- '<|start|>' + m.role + '<|channel|>final<|message|>' + m.content }}
    {%- if tools and loop.last %}{{- tools | tojson }}{%- endif %}
    {%- for call in m.tool_calls or [] %}{{- call.function | tojson }}{%- endfor %}{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, CONTROL)
    (folder / "channels.jinja").write_text(CHANNELS)
    (folder / "plain.jinja").write_text("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}")
    return folder


def model(folder: Path, template: str = "channels", **parsers: str) -> TextModel:
    return load(folder, folder / f"{template}.jinja", **parsers)


def test_the_marks_of_the_form_are_shown_and_end_no_turn(folder: Path) -> None:
    text = model(folder)
    control = text.tokenizer.control
    assert text.replies.family.name == "gpt-oss"
    assert text.tokenizer.decode([control["<|channel|>"], control["<|im_start|>"]]) == "<|channel|>"
    assert shown_bytes(text.tokenizer)[control["<|end|>"]] == b"<|end|>"
    assert {control["<|call|>"], control["<|return|>"]} <= set(text.end_ids)
    assert control["<|end|>"] not in text.end_ids  # although it is what the template writes behind a reply


def test_a_template_without_tools_speaks_our_form(folder: Path) -> None:
    text = model(folder, "plain")
    assert (text.template.wrapper, text.replies.family.name) == ("hermes", "hermes")
    assert text.tokenizer.decode([text.tokenizer.control["[TOOL_CALLS]"]]) == ""


def test_the_form_can_be_named(folder: Path) -> None:
    text = model(folder, tool_parser="mistral", reasoning_parser="none")
    assert (text.replies.family.name, text.replies.think) == ("mistral", None)
    assert text.tokenizer.decode([text.tokenizer.control["[TOOL_CALLS]"]]) == "[TOOL_CALLS]"
    assert text.tokenizer.control["<|end|>"] in text.end_ids


def test_ids_made_in_another_form_mean_something_else(folder: Path) -> None:
    assert model(folder).digest() != model(folder, tool_parser="hermes").digest()
    assert model(folder, "plain").digest() == model(folder, "plain").digest()
