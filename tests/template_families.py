"""The chat templates of model families, as packages bring them, over small vocabularies made here."""

from __future__ import annotations

import importlib.metadata
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo
from functools import cache
from pathlib import Path
from typing import Self
from unittest.mock import patch

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Encoder
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from agentserve.text import ChatTemplate, Tokenizer, hf_vocab
from agentserve.text.template_sources import TemplateSources

TODAY = datetime(2026, 11, 29)


@dataclass(frozen=True)
class Family:
    """`special`: control tokens, `markup`: tokens with text that users may not write either."""

    package: str
    file: str
    special: tuple[str, ...]
    markup: tuple[str, ...] = ()
    bos: str | None = None
    eos: str | None = None
    parallel: bool = True  # several calls in one turn
    alternates: bool = False  # users and assistants must take turns


_CHATML = ("<|im_start|>", "<|im_end|>")
_HERMES = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_THINK = ("<think>", "</think>")
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
_DEEPSEEK = tuple(
    f"<｜{name}｜>"
    for name in (
        *("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end"),
        *("tool▁call▁begin", "tool▁call▁end", "tool▁outputs▁begin", "tool▁outputs▁end"),
        *("tool▁output▁begin", "tool▁output▁end", "tool▁sep"),
    )
)
_GLM = ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>")
_HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>", "<|constrain|>")
_GEMMA4 = (
    *("<bos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>"),
    *("<|tool_response>", "<tool_response|>", "<|channel>", "<channel|>", '<|"|>', "<|think|>"),
)
_MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]")
_TOOLS = ("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
_TRL, _AXOLOTL = "trl/chat_templates", "axolotl/utils/chat_templates/templates"

FAMILIES = {
    "qwen2.5": Family("trl", f"{_TRL}/qwen2_5.jinja", _CHATML, _HERMES, eos="<|im_end|>"),
    "qwen3": Family("trl", f"{_TRL}/qwen3.jinja", _CHATML, _HERMES + _THINK, eos="<|im_end|>"),
    "qwen3.6": Family("trl", f"{_TRL}/qwen3_6.jinja", _CHATML, _HERMES + _THINK, eos="<|im_end|>"),
    "llama3.1": Family(
        "trl", f"{_TRL}/llama3_1.jinja", (*_LLAMA, "<|python_tag|>"),
        bos="<|begin_of_text|>", eos="<|eot_id|>", parallel=False,
    ),
    "llama3.2": Family(
        "trl", f"{_TRL}/llama3_2.jinja", _LLAMA, bos="<|begin_of_text|>", eos="<|eot_id|>", parallel=False
    ),
    "deepseek-v3": Family(
        "trl", f"{_TRL}/deepseekv3.jinja", _DEEPSEEK, _THINK, bos=_DEEPSEEK[0], eos=_DEEPSEEK[1]
    ),
    "glm4-moe": Family("trl", f"{_TRL}/glm4moe.jinja", _GLM, (*_HERMES, *_THINK, "<arg_key>", "</arg_key>")),
    "gpt-oss": Family("trl", f"{_TRL}/gptoss.jinja", _HARMONY, eos="<|return|>"),
    "gemma3": Family(
        "trl", f"{_TRL}/gemma3.jinja", ("<bos>", "<start_of_turn>", "<end_of_turn>"),
        bos="<bos>", eos="<end_of_turn>", alternates=True,
    ),
    "gemma4": Family("trl", f"{_TRL}/gemma4_v5.jinja", _GEMMA4, bos="<bos>", eos="<turn|>"),
    "mistral-v3": Family(
        "axolotl", f"{_AXOLOTL}/mistral_v3_tekken.jinja", _MISTRAL + _TOOLS,
        bos="<s>", eos="</s>", alternates=True,
    ),
    "mistral-v7": Family(
        "axolotl", f"{_AXOLOTL}/mistral_v7_tekken.jinja", (*_MISTRAL, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        bos="<s>", eos="</s>", alternates=True,
    ),
}  # fmt: skip


class _Today(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return cls(TODAY.year, TODAY.month, TODAY.day, tzinfo=tz)


@dataclass(frozen=True)
class Model:
    """One family's template on a vocabulary with its control tokens, ours and `transformers`'."""

    family: Family
    source: str
    tokenizer: Tokenizer
    chat: ChatTemplate
    theirs: PreTrainedTokenizerFast

    def expected(self, messages: Sequence[dict[str, object]], tools: list[object] | None) -> list[int]:
        """Raises jinja2's TemplateError where the template refuses."""
        with patch.object(chat_template_utils, "datetime", _Today):  # some print the date
            ids: list[int] = self.theirs.apply_chat_template(
                list(messages),
                tools=tools,
                chat_template=self.source,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        return ids


@cache
def model(name: str) -> Model:
    family = FAMILIES[name]
    files = importlib.metadata.files(family.package) or []
    source = next(file for file in files if str(file) == family.file).read_text()
    with tempfile.TemporaryDirectory() as folder:
        encoder = _encoder(source)
        encoder.add_special_tokens(
            [AddedToken(text, special=True, normalized=False) for text in family.special]
        )
        encoder.add_tokens([AddedToken(text, normalized=False) for text in family.markup])
        fast = PreTrainedTokenizerFast(tokenizer_object=encoder, bos_token=family.bos, eos_token=family.eos)
        fast.save_pretrained(folder)
        tokenizer = Tokenizer(hf_vocab.vocabulary(Path(folder)))
        theirs = AutoTokenizer.from_pretrained(folder)
    chat = ChatTemplate(TemplateSources(source), tokenizer, now=lambda: TODAY)
    return Model(family, source, tokenizer, chat, theirs)


def _encoder(text: str) -> Encoder:
    """Byte-level, trained on the template itself."""
    encoder = Encoder(models.BPE())
    split = pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"), "isolated")
    encoder.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    encoder.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    encoder.train_from_iterator(
        [text] * 2, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    return encoder
