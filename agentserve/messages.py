"""The whole wire protocol between the API process and a worker: commands down, events up.

Tagged msgspec structs in msgpack, never pickle; tokens, never tensors. Token runs travel as
little-endian int32 bytes, for which a 100K-token history costs one memory copy.
Who sends what and in which order is told in ARCHITECTURE.md ("Processes").
"""

from __future__ import annotations

import sys
from array import array

import msgspec

from agentserve.types import NO_SLO, FinishReason, Sampling, SessionId, SessionState, Slo, TurnId
from tiering.policy.base import Departure, Hints, Residency, Signal

PROTOCOL_VERSION = 6


def pack_tokens(tokens: array[int]) -> bytes:
    """Token ids as little-endian int32 bytes."""
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    return tokens.tobytes()


def unpack_tokens(data: bytes) -> array[int]:
    """The inverse of `pack_tokens`; a length that is no multiple of 4 is a ValueError."""
    tokens = array("i")
    tokens.frombytes(data)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


# --- commands: API process -> worker -----------------------------------------------------


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Begin turn `turn` of `session` on the context `tokens`.

    The worker opens the session if it does not know it. `tokens` is the whole context, so a
    restarted worker needs nothing else; what of it has KV already is found by the worker.
    """

    session: SessionId
    turn: TurnId
    tokens: bytes  # pack_tokens
    sampling: Sampling
    namespace: str = ""  # isolates prefix-cache hits; the tenant's cache salt, adapter, ...
    priority: int = 0  # larger is more urgent, among the turns of its tenant
    tenant: str = ""  # whose it is: order, share of the machine and what is learned are each tenant's own
    program: str = ""  # turns of one agent, whose service counts together; empty: the session's own
    slo: Slo = NO_SLO  # what was promised for it
    generated: int = 0  # how many of the last `tokens` this turn has generated already (a moved turn)
    shed: bool = False  # refuse it at once if the queue cannot keep that
    arrived: float | None = None  # when its client asked, monotonic seconds; None: now


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End a turn that runs or waits; its generated tokens are rolled back. Stale ones are ignored."""

    session: SessionId
    turn: TurnId


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """Another worker would take this turn over, which was preempted: give it up, unless it runs again.
    Answered by `Withdrawn`, or by the turn's end where that came first."""

    session: SessionId
    turn: TurnId


class Neighbour(msgspec.Struct, frozen=True, tag="neighbour"):
    """Another worker of this machine has room for a turn of so many pages; 0: none has."""

    pages: int


class Park(msgspec.Struct, frozen=True, tag="park"):
    """Say what an ended turn means: the session waits for a tool, or is simply idle."""

    session: SessionId
    turn: TurnId
    waiting_tool: bool
    tools: tuple[str, ...] = ()  # names of the calls that are outstanding, in call order
    hints: Hints = Hints()


class Hint(msgspec.Struct, frozen=True, tag="hint"):
    """What a client said about a session, checked and clipped by the API process. Replaces what it said
    before; times are of the machine's monotonic clock."""

    session: SessionId
    hints: Hints


class ToolSignal(msgspec.Struct, frozen=True, tag="signal"):
    """Early news of a tool result for a session that waits.

    `tokens` (pack_tokens): the context as far as it is known by now, the session's own tokens first.
    What of it is new may be computed ahead; nobody relies on it, and the next Submit decides.
    """

    session: SessionId
    turn: TurnId  # the one that waits; another's signal is stale
    signal: Signal
    tokens: bytes = b""


class Devalue(msgspec.Struct, frozen=True, tag="devalue"):
    """Nobody is likely to come back to this session's KV. It stays usable as long as it is there."""

    session: SessionId
    why: Departure


class Fork(msgspec.Struct, frozen=True, tag="fork"):
    """Open `child` on the first `length` tokens of `session`, sharing their KV copy-on-write."""

    session: SessionId
    child: SessionId
    length: int


class Close(msgspec.Struct, frozen=True, tag="close"):
    """Forget a session. Idempotent; a running turn is aborted first."""

    session: SessionId


class DefineGrammar(msgspec.Struct, frozen=True, tag="grammar"):
    """Make a compiled grammar known under `id` before the first Submit that names it."""

    id: str
    compiled: str  # xgrammar's own JSON serialisation


class DropGrammar(msgspec.Struct, frozen=True, tag="drop_grammar"):
    id: str


class Describe(msgspec.Struct, frozen=True, tag="describe"):
    """Ask for a `Description` of one session (empty `session`: of the worker as a whole)."""

    request: int
    session: SessionId | None = None


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_cache"):
    """Drop every cached page that no running turn uses; answered by a `Description`."""

    request: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Leave after the current step."""


Command = (
    Submit
    | Abort
    | Withdraw
    | Neighbour
    | Park
    | Hint
    | ToolSignal
    | Devalue
    | Fork
    | Close
    | DefineGrammar
    | DropGrammar
    | Describe
    | ResetPrefixCache
    | Shutdown
)


# --- events: worker -> API process -------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The worker's first message: it is ready to serve."""

    protocol: int
    pid: int
    backend: str  # which kernels run: "reference", ...
    backend_reason: str  # these, and why not faster ones: a sentence
    device: str
    dtype: str
    weights: str  # formats kept as the file has them ("Q4_1/Q8_0"); "expanded": none
    activations: str  # of products with these: "float", "int8"
    kv_dtype: str
    vocab_size: int
    max_model_len: int
    page_size: int
    pages: int  # pool size of the smallest KV group
    kv_bytes: int
    parameters: int
    weight_bytes: int  # as kept
    weights_digest: str
    namespace: str  # digest of all that decides what KV holds: settings and kernels too
    policy: str = ""  # in which order turns are served
    tensor_parallel: int = 1  # ranks that compute the model together; `kv_bytes` are of each


class StateChange(msgspec.Struct, frozen=True, tag="state"):
    """A session's public state has changed; `at` is the worker's monotonic clock in seconds."""

    session: SessionId
    turn: TurnId
    state: SessionState
    at: float
    reason: str = ""


class Token(msgspec.Struct, frozen=True, tag="token", gc=False):
    """One generated token. `index` counts from 0 within the turn, so that a repeat shows. There are many, and
    none is part of a cycle: the collector need not look at them."""

    session: SessionId
    turn: TurnId
    index: int
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class TurnUsage(msgspec.Struct, frozen=True):
    """What a turn cost. `cached = prompt - prompt tokens the executor computed` (first time only)."""

    prompt: int
    cached: int
    generated: int
    computed: int  # token rows the executor ran for this turn, recomputation included
    preemptions: int
    arrived: float  # monotonic clock of the machine, seconds; clients get the API side's reading of it
    admitted: float
    first_token: float
    ended: float
    # Promises, by their names in `Slo`; those that nobody can tell of are in neither.
    kept: tuple[str, ...] = ()
    missed: tuple[str, ...] = ()
    relegated: bool = False  # it had to wait behind turns that could still be in time
    swaps: int = 0  # of the preemptions: those for which its KV was to be moved out
    migrations: int = 0  # of the preemptions: those after which another worker went on with it
    held: dict[str, int] = {}  # in how many steps each limit kept it out; counted where it is recorded


class TurnEnded(msgspec.Struct, frozen=True, tag="ended"):
    """The last message about a turn. `error` explains REFUSED, SHED and ERROR in one line."""

    session: SessionId
    turn: TurnId
    reason: FinishReason
    usage: TurnUsage
    error: str = ""
    wait: float = 0.0  # of SHED: seconds after which the queue would have room, if nobody else came


class Displaced(msgspec.Struct, frozen=True, tag="displaced"):
    """A turn was preempted that would go on sooner on another worker, if that one has so many pages."""

    session: SessionId
    turn: TurnId
    pages: int


class Withdrawn(msgspec.Struct, frozen=True, tag="withdrawn"):
    """The answer to `Withdraw`. All tokens of the turn were told before it. usage: what it took here; None:
    it runs again, and stays."""

    session: SessionId
    turn: TurnId
    usage: TurnUsage | None


class Decided(msgspec.Struct, frozen=True):
    """One decision of the policy about a session at rest, and where its blocks were then."""

    at: float  # monotonic seconds
    choice: str
    reason: str
    price: float
    residency: Residency


class Decisions(msgspec.Struct, frozen=True, tag="decisions"):
    """Decisions that changed something, in order: of which session, how many of that session before it
    were not told (they come too often), and what. Bounded (`core.news`)."""

    made: tuple[tuple[SessionId, int, Decided], ...]


class SessionView(msgspec.Struct, frozen=True):
    """One session as the worker sees it."""

    session: SessionId
    state: SessionState
    turn: TurnId
    tokens: int
    computed: int  # of a session at rest: how many of its tokens have KV in the cache now
    pages: int
    preemptions: int
    residency: Residency | None = None  # of a session at rest, in blocks; None: no tiers
    rested: float = 0.0  # since when it is at rest, monotonic seconds
    tools: tuple[str, ...] = ()  # that it waits for
    decision: str = ""  # the policy's last choice, its reason, and what it costs by the policy's reckoning
    reason: str = ""
    price: float = 0.0
    until: float | None = None  # when it is looked at again, monotonic seconds
    decisions: tuple[Decided, ...] = ()  # the last ones that changed something, oldest first


class TiersView(msgspec.Struct, frozen=True):
    """The tiers below a worker's device. Counts are of blocks and only grow, unless said."""

    policy: str = ""
    host: int = 0  # slots in use now
    host_slots: int = 0
    disk: int = 0  # blocks there now
    disk_bytes: int = 0  # used now
    disk_budget: int = 0
    block_bytes: int = 0
    moving: int = 0  # blocks in transfers now
    pinned: int = 0  # device pages that these pin now
    hit_tokens: dict[str, int] = {}  # prompt tokens found, by tier ("device", "host", "disk")
    moved: dict[str, tuple[int, float]] = {}  # blocks and seconds, by move ("save", "load", ...)
    failed: dict[str, int] = {}  # by move
    evicted: dict[str, int] = {}  # by tier
    decisions: dict[str, int] = {}  # by choice
    waits: dict[str, tuple[int, int, int]] = {}  # by tool: ended, within their predicted median, and P90
    takeovers: int = 0  # times that the plain policy took over because it did better
    disk_error: str = ""  # why the disk is not used now; empty: it is in order, or there is none
    faults: dict[str, int] = {}  # by kind (tiering.types.TierFault)


class AheadCounts(msgspec.Struct, frozen=True):
    """Prompt tokens computed while a tool's output was arriving. They only grow."""

    computed: int = 0
    used: int = 0  # of these, those whose KV a turn then began with


class GroupPages(msgspec.Struct, frozen=True):
    """The pages of one KV group: each is one of these."""

    used: int  # held by running turns or transfers
    cached: int  # idle, evictable
    free: int


class PromiseCounts(msgspec.Struct, frozen=True):
    """What became of promises on a worker. They only grow."""

    relegated: int = 0  # turns that could not be in time any more, and went behind those that could
    shed: int = 0  # turns that were not begun
    unattainable: int = 0  # deadlines of tokens that no step could keep
    overruled: int = 0  # steps not cut for deadlines, as prompts had got too little


class PreemptionCounts(msgspec.Struct, frozen=True):
    """Preemptions of a worker. They only grow."""

    made: dict[str, dict[str, int]] = {}  # by why (core.victims.Why), then by way (core.victims.Way)
    swapped: int = 0  # blocks that were ordered to be moved out for them
    returned: int = 0  # blocks that were brought back from below for turns that had been preempted
    asked: int = 0  # turns that another worker was wanted for
    migrated: int = 0  # of these: those that went


class RunCounts(msgspec.Struct, frozen=True):
    """How steps were run, on a device where decode steps are recorded before they come. They only grow."""

    replayed: int = 0
    missed: int = 0  # decode steps for which nothing had been recorded
    launched: int = 0  # all that are more than one token of each sequence


class WorkerView(msgspec.Struct, frozen=True):
    """One worker's load and memory, for the router and /metrics. Page counts are of the tightest group."""

    running: int
    waiting: int
    sessions: int
    pages: int
    pages_free: int
    pages_cached: int  # idle, evictable
    pages_live: int  # referenced by running turns
    tiers: TiersView | None = None
    ahead: AheadCounts = AheadCounts()
    groups: tuple[GroupPages, ...] = ()  # all KV groups, in the model's order
    unrecorded: int = 0  # lines of its recording that could not be written; they only grow
    promises: PromiseCounts = PromiseCounts()
    preempted: PreemptionCounts = PreemptionCounts()
    runs: RunCounts = RunCounts()


class Description(msgspec.Struct, frozen=True, tag="description"):
    request: int
    worker: WorkerView
    session: SessionView | None = None


class StepDone(msgspec.Struct, frozen=True, tag="step"):
    """Everything one step brought about, in order. One frame per step keeps IPC off the critical path."""

    events: list[StateChange | Token | TurnEnded | Description | Decisions | Displaced | Withdrawn]
    worker: WorkerView | None = None


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """The worker cannot serve and leaves; sent instead of Hello. `error` is one line for the operator."""

    error: str


Event = Hello | StepDone | StartFailed
