"""A tensor-parallel group's steps: rank 0 has the plan, the others follow.

Plans go to the followers through their standard input, as typed msgpack: a follower that has nothing to do
sleeps in a read, notices at once that the leader is gone, and no collective waits for the next plan. What
they send to each other while they compute goes through `collectives`.
"""

from __future__ import annotations

import logging
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import BinaryIO, NoReturn

import msgspec

from agentserve.core.plan import Chunk, PageCopy, Plan, Sampled, SampleSpec, StepResult
from agentserve.executor.pool import KVPool
from agentserve.executor.runner import Row, TorchExecutor
from agentserve.models.decoder import Decoder
from agentserve.types import Sampling, SessionId, TurnId
from kernels.ops import Logits

log = logging.getLogger(__name__)

_HEADER = struct.Struct(">I")
_SESSION, _TURN = SessionId("followed"), TurnId(0)
_GREEDY = Sampling(temperature=0.0)


class GroupBroken(SystemExit):
    """The ranks are no longer at the same place: this worker ends, and its turns go on with another one."""


class FollowedChunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a follower needs of a chunk: int32 as bytes, and whether its last row is sampled."""

    start: int
    tokens: bytes
    tables: tuple[bytes, ...]
    sampled: bool


class FollowedPlan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a follower needs of a plan."""

    step: int
    copies: tuple[PageCopy, ...]
    chunks: tuple[FollowedChunk, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FollowedPlan)


def encode_plan(plan: Plan) -> bytes:
    """A plan as followers get it."""
    chunks = [
        FollowedChunk(
            chunk.start,
            chunk.tokens.tobytes(),
            tuple(table.tobytes() for table in chunk.tables),
            chunk.sample is not None,
        )
        for chunk in plan.chunks
    ]
    return _encoder.encode(FollowedPlan(plan.step, plan.copies, tuple(chunks)))


def decode_plan(body: bytes) -> Plan:
    """The plan that `encode_plan` was given, as far as rows, pages and logits go."""
    followed = _decoder.decode(body)
    return Plan(followed.step, followed.copies, tuple(map(_chunk, followed.chunks)), 0.0, ())


def _chunk(chunk: FollowedChunk) -> Chunk:
    tokens, tables = _ids(chunk.tokens), tuple(map(_ids, chunk.tables))
    sample = SampleSpec(_GREEDY, tokens, len(tokens), len(tokens)) if chunk.sampled else None
    return Chunk(_SESSION, _TURN, 0, chunk.start, tokens, tables, sample)


def _ids(data: bytes) -> array[int]:
    ids = array("i")
    ids.frombytes(data)
    return ids


def write_frame(pipe: BinaryIO, body: bytes) -> None:
    """One message: 4 bytes of length, big-endian, and the body. OSError if nobody reads it."""
    pipe.write(_HEADER.pack(len(body)))
    pipe.write(body)
    pipe.flush()


def read_frame(pipe: BinaryIO) -> bytes | None:
    """The next message; None at the end, also where it comes in the middle of one."""
    header = pipe.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    (length,) = _HEADER.unpack(header)
    body = pipe.read(length)
    return body if len(body) == length else None


class GroupExecutor:
    """`agentserve.core.ports.Executor` of rank 0: every plan goes to the followers, then to its own executor.

    A step that failed in the middle leaves the ranks at different places, whoever failed: `GroupBroken`.
    """

    def __init__(self, own: TorchExecutor, followers: Sequence[BinaryIO]) -> None:
        self._own = own
        self._followers = followers

    @property
    def decoder(self) -> Decoder:
        return self._own.decoder

    @property
    def pool(self) -> KVPool:
        """This rank's."""
        return self._own.pool

    def when_computing(self, call: Callable[[], None]) -> None:
        self._own.when_computing(call)

    def define_grammar(self, grammar_id: str, compiled: str) -> None:
        self._own.define_grammar(grammar_id, compiled)

    def drop_grammar(self, grammar_id: str) -> None:
        self._own.drop_grammar(grammar_id)

    def run(self, plan: Plan) -> StepResult:
        try:
            frame = encode_plan(plan)
            for pipe in self._followers:
                write_frame(pipe, frame)
            return self._own.run(plan)
        except Exception as error:
            log.exception("step %d failed, of %s", plan.step, [str(chunk.session) for chunk in plan.chunks])
            raise GroupBroken(
                f"step {plan.step} of a tensor-parallel group failed: this worker ends"
            ) from error


class NoSampler:
    """A follower's `SamplerPort`: its logits are a part, and the leader samples."""

    def sample(self, logits: Logits, specs: Sequence[Row]) -> list[Sampled]:
        return [Sampled(token=0)] * len(specs)

    def define_grammar(self, grammar_id: str, compiled: str) -> NoReturn:
        raise NotImplementedError("grammars are the leader's")

    def drop_grammar(self, grammar_id: str) -> NoReturn:
        raise NotImplementedError("grammars are the leader's")


def follow(executor: TorchExecutor, plans: BinaryIO) -> None:
    """Run what the leader runs, until it is gone. Whatever the step raises ends this rank."""
    while (body := read_frame(plans)) is not None:
        executor.run(decode_plan(body))
