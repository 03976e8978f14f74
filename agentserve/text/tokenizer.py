"""Text to token ids and back, with a wall between what a template writes and what users write.

`encode` never yields a control id, whatever the text says. `encode_rendered` is for the output of
a trusted template: control strings in it become control ids, every run between them is encoded
whole, as a `transformers` tokenizer does.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from types import MappingProxyType

from tokenizers import Tokenizer as Encoder

from agentserve.text.control import ControlMatcher
from agentserve.text.detokenizer import Detokenizer
from agentserve.text.errors import TextError
from agentserve.text.hiding import find_characters
from agentserve.text.pieces import encode
from agentserve.text.run_cache import RunCache
from agentserve.text.vocabulary import Vocabulary

_NO_STRINGS: Mapping[int, str] = MappingProxyType({})
_NO_IDS: Mapping[str, Sequence[int]] = MappingProxyType({})


class Tokenizer:
    """One model's tokenizer. Thread-safe: its only changing state is a locked cache of runs.

    `token_bytes[id]`: what a token stands for (a control token: its name, for display).
    `control`: every text users cannot write -> id. `special_ids`: those of them that have no text
    of their own, so decoding drops them and a grammar must not take them for their names.
    `eos_ids`: ids that end a generation; a chat also ends on `ChatTemplate.stop_ids`.
    """

    def __init__(self, vocabulary: Vocabulary, *, cache_bytes: int = 32 << 20) -> None:
        self._encoders = vocabulary.encoders
        self._prefix = vocabulary.prefix_ids
        self._suffix = vocabulary.suffix_ids
        self._strip = vocabulary.strips_leading_space
        self._cache = RunCache(cache_bytes)
        self._owner = ""
        self._control = vocabulary.control
        self.matcher = ControlMatcher(vocabulary.control)
        self.token_bytes: Sequence[bytes] = vocabulary.token_bytes
        self.vocab_size = len(vocabulary.token_bytes)
        self.control: Mapping[str, int] = MappingProxyType(
            {token.text: token.id for token in vocabulary.control}
        )
        self.special_ids = frozenset(token.id for token in vocabulary.control if token.special)
        self.special_texts = vocabulary.special_texts
        self.eos_ids = vocabulary.eos_ids

    def showing(self, texts: Collection[str]) -> Tokenizer:
        """The same tokenizer, with these control tokens shown: whoever reads the text needs to see them."""
        shown = {self.control[text] for text in texts if text in self.control}
        other = copy(self)
        other.special_ids = self.special_ids - shown
        return other

    def apart(self, owner: str) -> Tokenizer:
        """The same tokenizer, which finds nothing that others have had encoded. The room for what is
        remembered is one for all."""
        other = copy(self)
        other._owner = owner
        return other

    def digest(self) -> bytes:
        """SHA-256 of all that decides which ids a text has and which text ids have."""
        encoders = (self._encoders.first, self._encoders.after_control, self._encoders.joined)
        written = {id(encoder): encoder.to_str() for encoder in encoders}  # often one, and megabytes
        digest = hashlib.sha256()
        for part in (
            *(hashlib.sha256(written[id(encoder)].encode()).digest() for encoder in encoders),
            *self.token_bytes,
            repr((self._control, self._prefix, self._suffix, self._strip)).encode(),
            repr((sorted(self.special_texts.items()), sorted(self.eos_ids))).encode(),
            *([repr(sorted(shown)).encode()] if (shown := self._shown) else ()),
        ):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.digest()

    @property
    def _shown(self) -> frozenset[int]:
        """Control tokens that are shown although they have no text of their own."""
        return frozenset(token.id for token in self._control if token.special) - self.special_ids

    # --- text to ids ---------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, without BOS; control strings in it are spelled out as text."""
        return self._run(text, self._encoders.first).tolist()

    def encode_completion(self, text: str) -> list[int]:
        """Ids of a plain prompt, between BOS and EOS where the model wants them."""
        return [*self._prefix, *self.encode(text), *self._suffix]

    def encode_rendered(
        self,
        text: str,
        *,
        restore: Mapping[int, str] = _NO_STRINGS,
        spliced: Mapping[str, Sequence[int]] = _NO_IDS,
    ) -> list[int]:
        """Ids of a trusted template's output.

        `restore` maps code points to the plain text they stand for, put back after control tokens
        are found. `spliced` maps single characters to ids that take their place; text behind one
        continues it, as it would have after generating those ids.
        """
        out: list[int] = []
        where, at = self._encoders.first, 0
        for found in find_characters(spliced.keys(), text):
            self._between_controls(text[at : found.start()], where, restore, out)
            out.extend(spliced[found.group()])
            where, at = self._encoders.joined, found.end()
        self._between_controls(text[at:], where, restore, out)
        return out

    def _between_controls(
        self, text: str, where: Encoder, restore: Mapping[int, str], out: list[int]
    ) -> None:
        """Append the ids of `text`, which begins where the encoder `where` is for."""
        at = 0
        for start, end, token in self.matcher.find(text):
            if start < at:  # in white space that the last control token took
                continue
            run = text[at:start]
            if token.lstrip:
                run = run.rstrip()
            if run:
                out.extend(self._run(run.translate(restore), where))
            out.append(token.id)
            where = self._encoders.after_control
            at = end
            while token.rstrip and at < len(text) and text[at].isspace():
                at += 1
        if at < len(text):
            out.extend(self._run(text[at:].translate(restore), where))

    def _run(self, text: str, encoder: Encoder) -> array[int]:
        """Ids of one run of plain text."""
        key = (self._owner, id(encoder), text)
        ids = self._cache.get(key)
        if ids is None:
            try:
                ids = encode(text, encoder, self._encoders.joined)
            except (TypeError, UnicodeEncodeError):
                raise TextError("text holds a lone surrogate, which no UTF-8 text can") from None
            self._cache.put(key, ids)
        return ids

    # --- ids to text ---------------------------------------------------------------------

    def detokenizer(self, *, skip_control: bool = True, continues: bool = False) -> Detokenizer:
        """A fresh fold from ids to text. `continues`: the ids go on from other text, so that a
        SentencePiece prefix space is a real space."""
        hidden = self.special_ids if skip_control else frozenset[int]()
        return Detokenizer(self.token_bytes, hidden, strip_leading_space=self._strip and not continues)

    def decode(self, ids: Iterable[int], skip_control: bool = True) -> str:
        """The text of `ids`; special control tokens are dropped, or shown literally."""
        fold = self.detokenizer(skip_control=skip_control)
        return "".join([*map(fold.push, ids), fold.flush()])
