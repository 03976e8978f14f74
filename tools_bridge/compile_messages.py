"""What the compiler and its child processes say to each other: frames of MessagePack over pipes."""

from __future__ import annotations

from typing import BinaryIO, TypeVar

import msgspec

MAX_SOURCE_CHARS = 512 * 1024
MAX_COMPILED_CHARS = 8 * 1024 * 1024  # what a worker must read in one message

_LENGTH = 4  # bytes, little-endian, before each frame

T = TypeVar("T")


class Vocabulary(msgspec.Struct, frozen=True):
    """The first frame: what to compile for (see `GrammarVocabulary`), and how much memory it may cost."""

    token_bytes: list[bytes]
    vocab_size: int
    stop_token_ids: list[int]
    memory_bytes: int


class Job(msgspec.Struct, frozen=True):
    seconds: float  # after which the child ends itself, should nobody be left to end it
    request: bytes  # a `GrammarRequest`'s data
    let_go: dict[str, str]  # places of schemas that are held to their type alone, and why


class At(msgspec.Struct, frozen=True, tag="at"):
    """Before the reply to a job, once or more: the place of the schema that is now being compiled; of all of
    them together, that of the largest. What kills the child says no place."""

    place: str


class Made(msgspec.Struct, frozen=True, tag="made"):
    """The reply to each frame: a compiled grammar (nothing for the vocabulary, nor where a request's form is
    met by any text), or why there is none."""

    text: str = ""
    error: str = ""
    compiling: bool = False  # the error is of compiling, not of what a schema says
    place: str = ""  # of that
    left_out: tuple[str, ...] = ()  # what is not held, of schemas that need not be held to the letter
    last: bool = False  # the child ends itself now: it has become too large


def send(pipe: BinaryIO, message: msgspec.Struct) -> None:
    send_encoded(pipe, msgspec.msgpack.encode(message))


def send_encoded(pipe: BinaryIO, data: bytes) -> None:
    pipe.write(len(data).to_bytes(_LENGTH, "little"))
    pipe.write(data)
    pipe.flush()


def receive(pipe: BinaryIO, kind: type[T]) -> T | None:
    """The next frame; None at the end of the pipe, be it in the middle of a frame."""
    data = _frame(pipe)
    return None if data is None else msgspec.msgpack.decode(data, type=kind)


def receive_reply(pipe: BinaryIO) -> At | Made | None:
    """The same, from a child."""
    data = _frame(pipe)
    return None if data is None else msgspec.msgpack.decode(data, type=At | Made)


def _frame(pipe: BinaryIO) -> bytes | None:
    head = pipe.read(_LENGTH)
    if len(head) < _LENGTH:
        return None
    size = int.from_bytes(head, "little")
    data = pipe.read(size)
    return data if len(data) == size else None
