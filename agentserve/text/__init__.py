"""Tokenizers and chat templates: text to token ids and back."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from agentserve.text import gguf_vocab, hf_vocab, template_sources
from agentserve.text.detokenizer import Detokenizer
from agentserve.text.errors import TextError
from agentserve.text.gguf_metadata import read_metadata
from agentserve.text.template import ChatTemplate
from agentserve.text.tokenizer import Tokenizer
from tools_bridge.registry import DEFAULT_FORM, HERMES, ReplyForm, reply_form

# What damage leads to beyond what the readers look for: which of these depends on the damaged byte.
_DAMAGE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    MemoryError,
    RuntimeError,  # RecursionError too
)
_RUST_PANIC = "PanicException"  # a BaseException that the tokenizers package has no name for

__all__ = ["ChatTemplate", "Detokenizer", "TextError", "TextModel", "Tokenizer", "load"]


@dataclass(frozen=True, slots=True)
class TextModel:
    """The text side of one model."""

    tokenizer: Tokenizer  # shows the control tokens that replies are read by
    template: ChatTemplate
    replies: ReplyForm = DEFAULT_FORM

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Every token that ends a turn, ascending: the model's EOS, the template's end of a message, and
        those of the family; never one that goes on to a reply's next part.

        The one answer for whoever ends turns, masks ends or compiles grammars.
        """
        control = self.tokenizer.control
        own = {control[text] for text in self.replies.ends if text in control}
        inner = {control[text] for text in self.replies.markers if text in control}
        ends = self.tokenizer.eos_ids | self.template.stop_ids | own
        return tuple(sorted(ends - inner or ends))

    def digest(self) -> bytes:
        """SHA-256 of tokenizer and template: ids made under one mean nothing under another. It takes
        a moment (a vocabulary has megabytes)."""
        written = repr((self.tokenizer.digest(), self.template.sources, self.end_ids))
        return hashlib.sha256(written.encode("utf-8", "surrogatepass")).digest()


def load(
    path: Path,
    chat_template: Path | None = None,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    *,
    steadily: bool = False,
) -> TextModel:
    """Tokenizer and chat template of a `.gguf` file or a Hugging Face folder.

    `chat_template` takes the place of the model's own; the parsers (names of `tools_bridge.registry`) that
    of those which the template tells; `steadily`: see `agentserve.text.steady`. TextError, in one line,
    for whatever is missing, broken or not supported; no weights are read.
    """
    try:
        if path.is_dir():
            vocabulary, sources = hf_vocab.vocabulary(path), template_sources.from_folder(path)
        else:
            metadata = read_metadata(path)
            vocabulary = gguf_vocab.vocabulary(metadata)
            sources = template_sources.from_metadata(metadata)
        if chat_template is not None:
            sources = template_sources.from_file(chat_template)
        tokenizer = Tokenizer(vocabulary)
        template = ChatTemplate(sources, tokenizer, steadily=steadily)
        return _text_model(tokenizer, template, tool_parser, reasoning_parser)
    except OSError as error:
        raise TextError(f"{path}: {error.strerror or error}") from None
    except TextError as error:
        named = str(error) if path.name in str(error) else f"{path.name}: {error}"
        raise TextError(named) from None
    except _DAMAGE as error:
        raise _damaged(path, error) from error
    except BaseException as error:
        if type(error).__name__ != _RUST_PANIC:
            raise
        raise _damaged(path, error) from error


def _text_model(
    tokenizer: Tokenizer, template: ChatTemplate, tool_parser: str | None, reasoning_parser: str | None
) -> TextModel:
    if template.wrapper and not tool_parser:  # the template knows no tools: they are told in our form
        tool_parser = HERMES.name
    replies = reply_form("\n".join(template.sources), tool_parser, reasoning_parser)
    return TextModel(tokenizer.showing(replies.markers), template, replies)


def _damaged(path: Path, error: BaseException) -> TextError:
    reason = " ".join(str(error).split())[:200]
    return TextError(f"{path}: its tokenizer or template cannot be used ({type(error).__name__}: {reason})")
