"""A long text encoded in pieces: the ids are those of the whole, what it takes is that of a piece.

Encoded at once, a text takes a hundred times its size for as long as that lasts, and turning four megabytes'
ids into Python's, and letting go of the rest, holds the interpreter's lock for a tenth of a second.

Where to cut, the encoder says (`cuts.py`). A text in which it allows no cut is encoded whole.
"""

from __future__ import annotations

from array import array

from tokenizers import Encoding
from tokenizers import Tokenizer as Encoder

from agentserve.text.cuts import Found, Text, finds_no_words, places

SHORT = 4096  # characters: encoded with the lock held, which is not for long
PIECE = 16 << 10  # characters


def encode(text: str, where: Encoder, joined: Encoder) -> array[int]:
    """Ids of one run of plain text. `where`: the encoder for the place where it begins; `joined`: the one for
    text behind other text. TypeError or UnicodeEncodeError for a text that is no UTF-8."""
    if len(text) < SHORT:
        return array("i", where.encode(text, add_special_tokens=False).ids)
    source, ids = Text(text), array("i")
    at, size, found = 0, PIECE, None
    while at + size < len(text):
        found = found or _found(where, source.shown(at, at + size))
        cut = _cut(source, at, size, found, joined)
        if cut is None:
            size, found = len(text) if finds_no_words(where) else 2 * size, None
            continue
        place, count, following = cut
        ids.extend(found.ids[:count])
        at, size, where, found = at + place, PIECE, joined, following
    ids.extend(found.ids if found else _encoded(where, text[at:]).ids)
    return ids


def _cut(source: Text, at: int, size: int, found: Found, joined: Encoder) -> tuple[int, int, Found] | None:
    """Where the piece at `at` ends, how many ids stand before that, and the piece behind it."""
    text, end = source.text, at + size
    for place, count in places(text[at:end], found, joined):
        start = at + place
        next_end = min(start + PIECE, len(text))
        if text[start].isnumeric() and (next_end - end) % 3 == 0:
            continue  # numbers that are parted from their end would look alike by chance
        following = _found(joined, source.shown(start, next_end))
        if found.agrees(count, following):
            return place, count, following
    return None


def _found(encoder: Encoder, text: str) -> Found:
    encoded = _encoded(encoder, text)
    return Found(encoded.ids, encoded.offsets, encoded.word_ids)


def _encoded(encoder: Encoder, text: str) -> Encoding:
    """The library holds the interpreter's lock while it encodes one text, not while it encodes a batch."""
    [encoded] = encoder.encode_batch([text], add_special_tokens=False)
    return encoded
