"""The engine's ordered log as bytes: what went into a core, when, and which plans came out.

A core is a function of this log, so replaying the inputs into a new one must give the same plan
digests. Entries are length-prefixed msgpack frames; whoever writes or reads the file does the I/O.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence

import msgspec

from agentserve.core.cost import StepCost
from agentserve.core.market import TierSetup
from agentserve.core.plan import Plan, StepResult
from agentserve.messages import Command, pack_tokens
from agentserve.types import KVGroup
from tiering.types import Change, Transfer, TransferDone

RECORD_VERSION = 4
_HEADER = struct.Struct(">I")


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """The first entry: how the core was built. `config` is the core's configuration in msgpack, `cost`
    what it predicts steps with."""

    version: int
    config: bytes
    groups: tuple[KVGroup, ...]
    pages: tuple[int, ...]
    cost: StepCost = StepCost()
    tiers: TierSetup | None = None


class Commanded(msgspec.Struct, frozen=True, tag="commanded"):
    """`handle(command, now)`."""

    now: float
    command: Command


class Planned(msgspec.Struct, frozen=True, tag="planned"):
    """`begin_step(now)`, and the digest of the plan it gave; empty when it gave none."""

    now: float
    plan: bytes


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """`finish_step(result, now)`."""

    now: float
    result: StepResult


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """`fail_step(plan, error, now)`, of the plan begun last, or of what was run again of it."""

    now: float
    error: str


class Transferred(msgspec.Struct, frozen=True, tag="transferred"):
    """`finish_transfers(done, now)`."""

    now: float
    done: tuple[TransferDone, ...]


class Ticked(msgspec.Struct, frozen=True, tag="ticked"):
    """`tick(now)`."""

    now: float


class Ordered(msgspec.Struct, frozen=True, tag="ordered"):
    """What `take_transfers()` and `take_changes()` gave: its digest. Written only when they gave any."""

    transfers: bytes


class Cut(msgspec.Struct, frozen=True, tag="cut"):
    """Never written: what a reader finds at the end of a log whose last entry is not whole."""


Entry = Opened | Commanded | Planned | Finished | Failed | Transferred | Ticked | Ordered | Cut

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Entry)


def encode_entry(entry: Entry) -> bytes:
    body = _encoder.encode(entry)
    return _HEADER.pack(len(body)) + body


def decode_entries(data: bytes) -> Iterator[Entry]:
    """Entries in order. A last one that was cut short (the process was killed) becomes a `Cut`.

    Raises msgspec.MsgspecError on bytes that are no log.
    """
    start = 0
    while len(data) - start >= _HEADER.size:
        (length,) = _HEADER.unpack_from(data, start)
        start += _HEADER.size
        if len(data) - start < length:
            break
        yield _decoder.decode(data[start : start + length])
        start += length
    else:
        if start == len(data):
            return
    yield Cut()


def plan_digest(plan: Plan | None) -> bytes:
    """SHA-256 over everything in a plan that an executor acts on, and its reasons; empty for None."""
    if plan is None:
        return b""
    chunks = [
        (
            chunk.session,
            chunk.turn,
            chunk.epoch,
            chunk.start,
            pack_tokens(chunk.tokens),
            [pack_tokens(table) for table in chunk.tables],
            (chunk.sample.sampling, chunk.sample.prompt, chunk.sample.length) if chunk.sample else None,
        )
        for chunk in plan.chunks
    ]
    return hashlib.sha256(_encoder.encode((plan.step, plan.copies, chunks, plan.reasons))).digest()


def orders_digest(transfers: Sequence[Transfer], changes: Sequence[Change] = ()) -> bytes:
    """SHA-256 over transfers that a core ordered and what it said of earlier ones; empty for none."""
    if not transfers and not changes:
        return b""
    return hashlib.sha256(_encoder.encode((transfers, changes))).digest()
