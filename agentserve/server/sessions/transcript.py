"""The messages of sessions, and the tool results that are there before their turn can begin.

The directory names a history by keys; who goes on without sending it again needs its words. They are
kept beside the directory, written with a turn's commit, bounded in bytes: a session whose messages
were dropped goes on where its client sends them. Plain values, no event loop.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256

import msgspec

from agentserve.server.holdings import Holdings
from agentserve.server.sessions.session_record import Lease
from agentserve.server.text_port import JsonObject
from agentserve.text.conversation import parse_message
from agentserve.types import SessionId

MOST_BYTES = 256 << 20  # of all transcripts, in memory and on disk
SHARE = 8  # of that, the sessions that one request begins take no more beyond its first
OVERHEAD_BYTES = 1024  # of a transcript besides its texts
MOST_ANSWERS = 4096  # per session; older results are no longer known as repeats, their calls as answered
INHERITED = 0  # the number under which a fork knows the history it began with


class Told(msgspec.Struct, frozen=True):
    """What a request said, as far as a later turn needs it."""

    messages: bytes  # a JSON list of at least one message, as the client wrote them
    settings: bytes  # a JSON object: the request's other fields
    results: dict[str, bytes] = {}  # calls it answers -> digest of the result


class Held(msgspec.Struct, frozen=True):
    """A tool result that was taken and is not yet part of a committed turn."""

    content: bytes  # JSON, a string or a list of text parts
    digest: bytes  # of the texts; empty: made up by us, for a call that will get no result
    epoch: int  # of the session when it was taken


class Answer(msgspec.Struct, frozen=True):
    """A result that is part of the history."""

    digest: bytes
    epoch: int
    turn: int  # the one that it began


class Transcript(msgspec.Struct, frozen=True):
    """One session's words up to its last committed turn. A value: changes make a new one."""

    session: SessionId
    messages: bytes  # a JSON list; the reply of the last turn is its last message
    settings: bytes
    marks: tuple[tuple[int, int], ...]  # (turn, number of messages up to its reply), oldest first
    held: dict[str, Held] = {}
    answers: dict[str, Answer] = {}

    @property
    def cost(self) -> int:
        """Bytes, roughly."""
        held = sum(len(result.content) + 200 for result in self.held.values())
        return (
            OVERHEAD_BYTES
            + len(self.messages)
            + len(self.settings)
            + held
            + 64 * len(self.marks)
            + 160 * len(self.answers)
        )

    def at(self, turn: int) -> int | None:
        """How many messages the history had when `turn` was committed; None: no such turn."""
        return next((count for number, count in self.marks if number == turn), None)


def write_json(value: object) -> bytes:
    """JSON of what may hold half a surrogate pair: no client can send one, a model can write one."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(value, ensure_ascii=True).encode()


def read_messages(data: bytes) -> list[JsonObject]:
    """What `write_json` wrote of a list of messages."""
    try:
        return msgspec.json.decode(data, type=list[JsonObject])
    except msgspec.DecodeError:
        found: list[JsonObject] = json.loads(data)
        return found


def result_digest(content: object) -> bytes:
    """Equal for contents that say the same: a string, and that string as a text part.

    Raises TextError for what is no content of a message.
    """
    parts = parse_message({"role": "tool", "content": content}).parts
    return sha256(msgspec.json.encode(parts)).digest()


class Transcripts:
    """All sessions' transcripts; of too many bytes the longest unused go, of the tenant that has most."""

    def __init__(self, max_bytes: int = MOST_BYTES) -> None:
        self.on_drop: Callable[[SessionId], None] = lambda key: None  # of one there was no room for
        self.owner_of: Callable[[SessionId], str] = lambda key: ""  # its tenant
        self._unsure: dict[SessionId, frozenset[str]] = {}
        self._kept: dict[SessionId, Transcript] = {}
        self._owners: dict[SessionId, str] = {}  # of them
        self._held: Holdings[SessionId] = Holdings(sys.maxsize, max_bytes)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def size_bytes(self) -> int:
        return self._held.size

    def siblings(self, told: Told) -> int:
        """Of how many sessions that one request begins the words are kept, besides the first's: they are the
        same words, and the others can be told them again."""
        cost = OVERHEAD_BYTES + len(told.messages) + len(told.settings)
        return self._held.most_size // SHARE // cost

    def get(self, key: SessionId) -> Transcript | None:
        return self._kept.get(key)

    def committed(self, lease: Lease, told: Told, reply: JsonObject) -> None:
        """A turn was committed: `reply` is its message. What was held for it is answered now."""
        self._put(self.after(lease, told, reply))

    def after(self, lease: Lease, told: Told, reply: JsonObject) -> Transcript:
        """What the transcript is once the turn is committed."""
        before = self._kept.get(lease.key)
        count = len(lease.keys) + 1
        epoch = lease.session.epoch
        marks = before.marks if before else ()
        answers = dict(before.answers) if before else {}
        for call, digest in told.results.items():
            held = before.held.get(call) if before else None
            known = held if held is not None and held.digest == digest else None
            answers[call] = Answer(digest, known.epoch if known else epoch, lease.turn)
        for call, result in (before.held if before else {}).items():
            if not result.digest and call in answers:  # nobody's result: any that comes differs
                answers[call] = Answer(b"", result.epoch, lease.turn)
        return Transcript(
            session=lease.key,
            messages=told.messages[:-1] + b"," + write_json(reply) + b"]",
            settings=told.settings,
            marks=(*marks, (int(lease.turn), count)),
            answers=dict(list(answers.items())[-MOST_ANSWERS:]),
        )

    def rolled_back(self, key: SessionId) -> None:
        """A turn was undone: results stay taken, but those we made up may still come."""
        kept = self._kept.get(key)
        if kept is not None:
            self.restore(kept)

    def take(self, key: SessionId, results: Mapping[str, Held]) -> None:
        """Hold results until the session's turn begins. The transcript must be there."""
        kept = self._kept[key]
        self._put(_with_held(kept, {**kept.held, **results}))

    @contextmanager
    def writing(self, key: SessionId, calls: Iterable[str]) -> Iterator[None]:
        """Results of these calls are held, and not on disk yet. One at a time for a session."""
        self._unsure[key] = frozenset(calls)
        try:
            yield
        finally:
            del self._unsure[key]

    def certain(self, key: SessionId) -> dict[str, Held]:
        """The results held for a session that cannot be lost any more: who has told of one, or has let go of
        where it came from, is not proved wrong by the end of the server."""
        kept, unsure = self._kept.get(key), self._unsure.get(key, frozenset())
        held = {} if kept is None else kept.held
        return {call: result for call, result in held.items() if call not in unsure}

    def put_back(self, before: Transcript) -> None:
        """Undo `take`: hold what was held before it, unless a turn was committed since."""
        kept = self._kept.get(before.session)
        if kept is not None and kept.marks == before.marks:
            self._put(_with_held(kept, before.held))

    def fork(self, source: Transcript, child: SessionId, messages: Sequence[JsonObject]) -> None:
        """A child that shares the first messages. Settings go with it, results that are held do not."""
        self._put(Transcript(child, write_json(messages), source.settings, ((INHERITED, len(messages)),)))

    def forget(self, key: SessionId) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._held.drop(self._owners.pop(key), key)

    # --- for a journal -----------------------------------------------------------------

    def export(self, key: SessionId) -> bytes:
        """All there is of a session; empty: nothing."""
        kept = self._kept.get(key)
        return b"" if kept is None else msgspec.msgpack.encode(kept)

    def restore(self, transcript: Transcript) -> None:
        """Take in what was exported, maybe while a turn ran, which is no more."""
        held = {call: result for call, result in transcript.held.items() if result.digest}
        self._put(_with_held(transcript, held))

    def _put(self, transcript: Transcript) -> None:
        self.forget(transcript.session)
        cost = transcript.cost
        if cost > self._held.most_size:
            self.on_drop(transcript.session)
            return
        owner = self._owners[transcript.session] = self.owner_of(transcript.session)
        self._kept[transcript.session] = transcript
        self._held.put(owner, transcript.session, cost)
        while (oldest := self._held.next_out()) is not None:
            self.forget(oldest)
            self.on_drop(oldest)


def read_transcript(data: bytes, key: SessionId, messages: int) -> Transcript | None:
    """What `export` wrote of a session with so many messages; None if it is not that."""
    try:
        found = msgspec.msgpack.decode(data, type=Transcript)
    except ValueError:  # msgspec's and Unicode's are, too
        return None
    fits = found.session == key and found.marks and found.marks[-1][1] == messages
    return found if fits else None


def _with_held(kept: Transcript, held: dict[str, Held]) -> Transcript:
    return msgspec.structs.replace(kept, held=held)
