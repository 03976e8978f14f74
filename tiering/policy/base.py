"""What a tier policy is asked, and what it answers. Ours and the published ones stand behind this.

The core reports what happens to sessions (`parked`, `resumed`, `signalled`, `gone`), asks `decide`
about a session at rest when it parks and again when the decision says to look again, and asks
`worth` which blocks go first when a tier is full. A policy never touches blocks: it can make a
session slower (its KV is computed again), never wrong, and never block anybody's admission.

Times are seconds of one monotonic clock; sizes are blocks (pages of all KV groups at one place).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Protocol, runtime_checkable

import msgspec

from tiering.types import Tier


class Rest(Enum):
    """Why a session is at rest."""

    TOOL = "tool"  # its turn ended in tool calls
    IDLE = "idle"  # its turn ended, nothing is outstanding
    PRESSURE = "pressure"  # it was preempted: it wants to go on as soon as it can


class Departure(Enum):
    """Why nobody will come back to a session's KV (as far as anybody knows)."""

    FINISHED = "finished"
    ABANDONED = "abandoned"
    SUPERSEDED = "superseded"  # a newer turn or branch took its place
    COMPACTED = "compacted"  # its history was replaced by a shorter one


class Signal(Enum):
    """Early news of a tool result."""

    CONNECTED = "connected"  # somebody opened the connection that will bring it
    STREAMING = "streaming"  # its first bytes are here
    EXPECTED = "expected"  # the client says when (`Hints.expected_wait`, counted from now)
    BROKEN = "broken"  # that connection has ended without it; a policy is not told


class Span(msgspec.Struct, frozen=True):
    """How much a run of a session's tokens is wanted, beside its others."""

    start: int
    end: int | None  # the first token after it; None: to the end, wherever that will be
    priority: int  # 0: not worth keeping, to 100


class Hints(msgspec.Struct, frozen=True):
    """What a client said about a session, already checked and clipped. All optional, all revocable."""

    expected_wait: float | None = None  # seconds from the park (or the hint) to the next turn
    deadline: float | None = None  # absolute time until which the next first token is wanted
    priority: int = 0  # larger is more urgent
    final: bool = False  # no further turn will come
    retain: float | tuple[Span, ...] | None = None  # what of it to keep (tiering.retention); None: all alike


class Park(msgspec.Struct, frozen=True):
    """A session came to rest."""

    session: str
    at: float
    rest: Rest
    turn: int
    tools: tuple[str, ...]  # names of the calls that are outstanding, in call order
    tokens: int  # that have KV now
    blocks: int  # full blocks of these
    private: int  # of these, blocks that no other known session shares
    program: float  # when the session's first turn arrived
    service: float = 0.0  # seconds of steps it has taken part in so far
    hints: Hints = Hints()
    tenant: str = ""  # what is learned of a session is its tenant's


class Residency(msgspec.Struct, frozen=True):
    """Where a session's blocks are. A block that is in several tiers counts in the fastest; `copied`
    counts those on the device that also have a copy below."""

    device: int
    host: int
    disk: int
    gone: int
    copied: int = 0


class Prices(msgspec.Struct, frozen=True):
    """One cost model for everybody, measured online. Seconds for `n` blocks: fixed + per_block * n."""

    block_bytes: int
    save: tuple[float, float]  # device -> host: (fixed, per block)
    load: tuple[float, float]  # host -> device
    write: tuple[float, float]  # host -> disk
    fetch: tuple[float, float]  # disk -> device
    prefill: tuple[float, float, float]  # fixed, per token, per (query, key) pair attended
    page_size: int

    def seconds(self, move: tuple[float, float], blocks: int) -> float:
        return move[0] + move[1] * blocks if blocks > 0 else 0.0

    def recompute(self, start: int, tokens: int) -> float:
        """Prefilling `tokens` tokens from position `start` on."""
        if tokens <= 0:
            return 0.0
        fixed, per_token, per_pair = self.prefill
        pairs = tokens * start + tokens * (tokens + 1) // 2
        return fixed + per_token * tokens + per_pair * pairs


class Market(msgspec.Struct, frozen=True):
    """The tiers at one moment: what there is, and who wants it."""

    now: float
    device: int  # blocks of the device pool
    device_free: int  # free, or idle with a copy below or no worth: to be had without loss
    demand: int  # blocks that waiting sessions lack
    waiting: int  # sessions that wait for pages
    queue: float  # seconds that a session arriving now without residency would wait before it starts
    host: int  # slots
    host_free: int
    disk: int  # blocks that the disk budget allows; 0: there is no disk
    disk_free: int
    parked: int  # sessions at rest
    prices: Prices


class Choice(Enum):
    """Where a session's KV should be. HOLD: on the device; HOST, DISK: it may leave the device once it
    has a copy there; DROP: it may go without one; RESTORE: back onto the device before it is asked for."""

    HOLD = "hold"
    HOST = "host"
    DISK = "disk"
    DROP = "drop"
    RESTORE = "restore"


class Decision(msgspec.Struct, frozen=True):
    """What to do with a session's KV now, and when to ask again."""

    choice: Choice
    until: float  # ask again then (or earlier, if something happens); math.inf: only if something happens
    reason: str  # a few words, shown to operators
    price: float = 0.0  # expected seconds lost per second by what was chosen, for the operator's eye


class Policy(Protocol):
    """One way to decide. Deterministic: a function of what it was told."""

    @property
    def name(self) -> str: ...

    @property
    def eager(self) -> bool:
        """Whether a session's blocks get copies in free host slots as soon as its turn ends, before it is
        known what the end means: a step later others may have taken their pages."""
        ...

    def parked(self, park: Park) -> None: ...

    def resumed(self, session: str, at: float, waited: float) -> None:
        """Its next turn has arrived, `waited` seconds after it was parked. `waited` is the tool's
        or client's own time: what the scheduler adds is not in it."""
        ...

    def signalled(self, session: str, signal: Signal, at: float, hints: Hints) -> None: ...

    def gone(self, session: str, at: float, why: Departure) -> None:
        """Idempotent. A finished session is forgotten; the others may come back all the same."""
        ...

    def decide(self, session: str, residency: Residency, market: Market) -> Decision:
        """About a session at rest. A session that it does not know: DROP."""
        ...

    def worth(self, session: str, tier: Tier, residency: Residency, market: Market) -> float:
        """Seconds that a block of the session in `tier` is worth: the least goes first when the tier
        is full, tail blocks of a session before its head. A shared block is worth its best sharer."""
        ...

    def rank(self, session: str, arrived: float, market: Market) -> tuple[float, ...]:
        """Order in which waiting turns are admitted, smallest first; (arrived,) is first come, first
        served. Must not starve: a policy bounds what it adds before `arrived`."""
        ...


@runtime_checkable
class Watched(Protocol):
    """A policy with figures of its own for operators."""

    @property
    def takeovers(self) -> int:
        """Times that the plain policy it has to fall back on came to lead."""
        ...

    @property
    def predicted(self) -> Mapping[str, tuple[int, int, int]]:
        """By tool: waits that ended, and how many of them by their predicted median and P90."""
        ...
