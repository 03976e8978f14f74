"""Where a text may be cut so that its pieces, encoded one by one, have the ids of the whole.

At a place behind which the encoder, beginning there, finds the very words and ids that it found there when it
saw what stands before, too, for more characters than any pattern of words looks at.

- Between words this is enough for any encoder: words are found from left to right, and each is encoded by
  itself.
- Within a word it is enough for byte-pair encoding. Two neighbours among the tokens of a word were never
  merged, so what happened on one side of the place between them did not depend on the other, except for which
  neighbour it had; and a token was merged from its own characters alone, so tokens that end up the same were
  the same neighbour all the time. So the end of one text's tokens, and the beginning of another's, that were
  neighbours in a third are the tokens of both texts joined.

What an encoder is shown of a text ends somewhere, and patterns of words may look as far as a run of
characters goes: white space is parted by whether a line ends further on in it, and some part numbers from
their end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise

from tokenizers import Tokenizer as Encoder
from tokenizers.models import BPE
from tokenizers.normalizers import Normalizer

AHEAD = 512  # characters: more than any pattern of words looks at
_TRIES = 8  # places of each kind
_NEAR = 8  # characters that may become others together
_SCANNED = 64 << 10  # characters looked through at once: the interpreter's lock is held meanwhile


@dataclass(frozen=True, slots=True)
class Found:
    """What an encoder found in a text: per token its id, where it stands, and the number of its word."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    words: list[int | None]

    def agrees(self, count: int, following: Found) -> bool:
        """Whether the next `AHEAD` characters behind the first `count` tokens look the same in `following`,
        which begins there."""
        place = self.offsets[count - 1][1]
        end = count + 1
        while end < len(self.offsets) and self.offsets[end][0] < place + AHEAD:
            end += 1
        size = end - count
        return (
            self.ids[count:end] == following.ids[:size]
            and _begin_words(self.words[count:end]) == _begin_words(following.words[:size])
        )  # fmt: skip


def _begin_words(words: list[int | None]) -> list[bool]:
    return [before != after for before, after in pairwise(words)]


class Text:
    """A long text, of which encoders are shown parts."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._white = 0  # the end of the run of white space that was last looked through,
        self._line = -1  # and its last end of a line

    def shown(self, start: int, end: int) -> str:
        """`[start, end)`; if that ends in the midst of white space also, in short, how the run goes on:
        whether a line ends in it, and what comes behind."""
        text = self.text
        if end >= len(text) or not (text[end - 1].isspace() and text[end].isspace()):
            return text[start:end]
        if end >= self._white:
            self._look_through(end)
        line = text[self._line] if self._line >= end else ""
        return text[start:end] + line + text[self._white - 1 : self._white + AHEAD]

    def _look_through(self, start: int) -> None:
        self._line, at = -1, start
        while True:
            some = self.text[at : at + _SCANNED]
            white = len(some) - len(some.lstrip())
            last = max(some.rfind("\n", 0, white), some.rfind("\r", 0, white))
            if last >= 0:
                self._line = at + last
            at += white
            if white < len(some) or not some:
                self._white = at
                return


def places(part: str, found: Found, encoder: Encoder) -> Iterator[tuple[int, int]]:
    """Places in a part of a text, in which `found` was, that are worth a try, best ones first, each with the
    number of tokens before it. `encoder`: the one for what stands behind them."""
    normalizer = encoder.normalizer
    yield from islice(_places(part, found, normalizer, between=True), _TRIES)
    if isinstance(encoder.model, BPE):
        yield from islice(_places(part, found, normalizer, between=False), _TRIES)


def _places(
    part: str, found: Found, normalizer: Normalizer | None, *, between: bool
) -> Iterator[tuple[int, int]]:
    """From the last backwards, where words end (`between`) or go on."""
    offsets, words = found.offsets, found.words
    last = bisect_left(offsets, (len(part) - 2 * AHEAD, 0)) - 1
    for index in range(last, 0, -1):
        place = offsets[index - 1][1]  # some do not count a space as a part of its word
        if place <= len(part) // 2:
            return
        if (
            (words[index] != words[index - 1]) == between
            and offsets[index][0] >= place  # else both are parts of one character
            and _stay_apart(part[place - _NEAR : place], part[place : place + _NEAR], normalizer)
        ):
            yield place, index


def _stay_apart(before: str, after: str, normalizer: Normalizer | None) -> bool:
    """Whether normalising two neighbours makes of both what it makes of each."""
    if normalizer is None or (before.isascii() and after.isascii()):
        return True
    apart: str = normalizer.normalize_str(before) + normalizer.normalize_str(after)
    return apart == normalizer.normalize_str(before + after)


def finds_no_words(encoder: Encoder) -> bool:
    """Whether there is nowhere to cut for this encoder, whatever the text."""
    return encoder.pre_tokenizer is None and not isinstance(encoder.model, BPE)
