"""The lines of a recording, each a JSON object whose `kind` says which.

No text of a prompt or reply and no key is in any of them. Times end in `_ts` and are seconds of the
machine's monotonic clock, which all processes of a machine share; `Opened` says what Unix time it was.
Lines may get more fields; who reads passes over those that it does not know.
"""

from __future__ import annotations

from enum import Enum
from itertools import accumulate

import msgspec

from agentserve.core.timing.fingerprint import Fingerprint
from agentserve.messages import GroupPages
from agentserve.types import Slo

RECORDING_VERSION = 1


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="opened"):
    """Whose lines follow: at the beginning of each file, and where a later process goes on with it."""

    version: int = RECORDING_VERSION
    at_ts: float
    unix: float  # the same moment
    model: str
    policy: str  # of the scheduler
    worker: int | None = None  # whose iterations; None: of the server, requests
    groups: tuple[str, ...] = ()  # names of the KV groups, as iterations list them
    page_size: int = 0
    step_tokens: int = 0  # the most that an iteration may have
    machine: dict[str, str | int | float] = {}  # what times depend on, as far as it is known
    fingerprint: Fingerprint | None = None  # of a worker: all that they depend on but for what is in a step


class Gap(msgspec.Struct, frozen=True, tag_field="kind", tag="gap"):
    """So many lines are missing here: they came faster than they could be written."""

    lines: int


class Status(Enum):
    """How a request ended."""

    COMPLETED = "completed"  # by the model's own end
    LENGTH = "length"  # max_tokens, the context or the KV pool was used up
    CANCELLED = "cancelled"  # by its client, or with it
    ERROR = "error"  # a fault of the server's
    REJECTED = "rejected"  # never admitted; `reason` says why
    SHED = "shed"  # given up, as its promise could not be kept


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="request"):
    """One turn that a client asked for, or one request that got none. What never happened, or nobody was told
    of as its client had left, is null."""

    request: str  # its id, as in `x-request-id`; empty: the server began the turn by itself
    route: str
    tenant: str
    session: str
    turn: int
    policy: str
    status: Status
    reason: str  # a finish reason or an error's code
    arrival_ts: float  # the whole request was there, before anything was done with it
    submit_ts: float | None  # its prompt was handed to the scheduler: from here on the SLO counts
    admit_ts: float | None  # it got its seat
    first_token_ts: float | None
    every_token_ts: tuple[float, ...]
    """Milliseconds: of the first token from `arrival_ts`, of each other one from the token before it, as they
    left for the client; `token_times` gives seconds of the clock."""
    finish_ts: float
    prompt_tokens: int
    prefix_hit_tokens: int | None  # of these, those that needed no computation
    output_tokens: int
    computed_tokens: int | None  # rows that were run for it, what was run again included
    preemption_count: int
    queue_reasons: dict[str, int]  # in how many iterations each limit kept it waiting, as it was named
    slo: Slo | None
    slo_met: bool | None  # None: nothing was promised

    @property
    def token_times(self) -> tuple[float, ...]:
        return tuple(self.arrival_ts + gone / 1e3 for gone in accumulate(self.every_token_ts))


class Swapped(msgspec.Struct, frozen=True, rename={"into": "in", "out_of": "out"}):
    """Bytes of KV that came onto the device and left it since the iteration before."""

    into: int = 0
    out_of: int = 0


class IterationRecord(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag_field="kind",
    tag="iteration",
    rename={"kv_pages": "KV_pages"},
):
    """One step of one worker."""

    step: int
    begin_ts: float
    scheduled_tokens: int
    decodes: int  # rows of one token
    chunks: int  # longer ones
    iteration_ms: float  # from planning to results: scheduling, copies, forward pass, sampling, booking
    model_ms: float  # of these, the executor's: what `predicted_ms` predicts
    predicted_ms: float  # 0: nothing is known of this machine
    bound_ms: float = 0.0  # what `model_ms` is hardly to exceed; 0: the same
    kv_pages: tuple[GroupPages, ...]  # by KV group, after it (with overlap: once the next is planned)
    swapped_bytes: Swapped
    binding_limit: str  # the first that kept it from being larger or admitting more; empty: none did
    limits: dict[str, int]  # how many turns each held up or cut short
    preempted: int
    running: int  # turns with a seat after it
    waiting: int
    failed: bool = False  # the executor raised; `model_ms` is then the whole
    features: dict[str, float] | None = None  # what its time is predicted from


Line = Opened | Gap | RequestRecord | IterationRecord

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Line)


def encode_line(line: Line) -> bytes:
    return _encoder.encode(line) + b"\n"


def decode_line(line: bytes) -> Line:
    """msgspec.MsgspecError or UnicodeDecodeError where it was cut, damaged, or is none of these."""
    return _decoder.decode(line)
