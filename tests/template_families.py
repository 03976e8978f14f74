"""The chat templates of model families, as packages bring them, over small vocabularies made here."""

from __future__ import annotations

import importlib.metadata
import tempfile
from collections.abc import Mapping, Sequence
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
from tests.template_table import FAMILIES, Family

TODAY = datetime(2026, 11, 29)


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

    def expected(
        self,
        messages: Sequence[dict[str, object]],
        tools: list[dict[str, object]] | None,
        kwargs: Mapping[str, str | bool],
    ) -> list[int]:
        """Raises jinja2's TemplateError where the template refuses."""
        with patch.object(chat_template_utils, "datetime", _Today):  # some print the date
            ids: list[int] = self.theirs.apply_chat_template(
                list(messages),
                tools=tools,
                chat_template=self.source,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **kwargs,
            )
        return ids


@cache
def model(name: str, steadily: bool = False) -> Model:
    family = FAMILIES[name]
    source = _source(family)
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
    chat = ChatTemplate(TemplateSources(source), tokenizer, steadily=steadily, now=lambda: TODAY)
    return Model(family, source, tokenizer, chat, theirs)


def _source(family: Family) -> str:
    try:
        files = importlib.metadata.files(family.package) or []
    except importlib.metadata.PackageNotFoundError:
        raise RuntimeError(f"{family.package} is not installed: `make setup` does it") from None
    return next(file for file in files if str(file) == family.file).read_text()


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
