"""A long text encoded in pieces: the ids are those of the whole, what it takes is that of a piece.

Encoded at once, a text takes a hundred times its size for as long as that lasts, and turning four megabytes'
ids into Python's, and letting go of the rest, holds the interpreter's lock for a tenth of a second.

Where to cut, the encoder says: a piece ends where the encoder, shown what comes next, too, began another
word. Encoders find words from left to right and look at them one by one, so such an end changes nothing. One
that knows no words, or a text without such a place, is encoded whole.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left

from tokenizers import Encoding
from tokenizers import Tokenizer as Encoder

SHORT = 4096  # characters: encoded with the lock held, which is not for long
PIECE = 16 << 10  # characters
AHEAD = 512  # characters behind a cut that the encoder is shown: more than any pattern of words looks at
# Before a space, or between a mark and a word: JSON may have no spaces. Never before what joins the character
# before it (an accent).
_PLACES = re.compile(r"(?<=[!-~\w])[ \n](?=[!-~\w])|(?<=[!-/:-@\[-`{-~])(?=\w)")
_TRIES = 16


def encode(text: str, where: Encoder, joined: Encoder) -> array[int]:
    """Ids of one run of plain text. `where`: the encoder for the place where it begins; `joined`: the one for
    text behind other text. TypeError or UnicodeEncodeError for a text that is no UTF-8."""
    if len(text) < SHORT:
        return array("i", where.encode(text, add_special_tokens=False).ids)
    ids = array("i")
    at, size = 0, PIECE
    while at + size < len(text):
        encoded = _encoded(where, text[at : at + size])
        cut = _cut(text[at : at + size - AHEAD], encoded)
        if cut is None:  # none of many words, or no words at all
            size = size * 2 if _has_words(encoded) else len(text)
            continue
        place, count = cut
        ids.extend(encoded.ids[:count])
        at, size, where = at + place, PIECE, joined
    ids.extend(_encoded(where, text[at:]).ids)
    return ids


def _encoded(encoder: Encoder, text: str) -> Encoding:
    """The library holds the interpreter's lock while it encodes one text, not while it encodes a batch."""
    [encoded] = encoder.encode_batch([text], add_special_tokens=False)
    return encoded


def _cut(text: str, encoded: Encoding) -> tuple[int, int] | None:
    """The last place of `text`, the beginning of what was encoded, at which it may be cut, and how many ids
    stand before it."""
    offsets, words = encoded.offsets, encoded.word_ids
    starts = [start for start, _ in offsets]
    for found in reversed(list(_PLACES.finditer(text, len(text) // 2))[-_TRIES:]):
        place = found.start()
        index = bisect_left(starts, place)
        if (
            0 < index < len(starts)
            and starts[index] in (place, found.end())  # some do not count a space as a part of its word
            and offsets[index - 1][1] <= place
            and words[index] != words[index - 1]
        ):
            return place, index
    return None


def _has_words(encoded: Encoding) -> bool:
    words = encoded.word_ids
    return bool(words) and words[0] != words[-1]
