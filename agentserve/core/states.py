"""The session state machine: one transition table, as data.

Theory of operation. A session is in exactly one *phase*. The public states PREFILLING and
DECODING are both phase RUNNING: which of the two a client is shown is derived from how far
`computed` lags behind the tokens. Only the session table moves a session, and only through `after`;
an event that the table does not have is an error. The API process's directory records the states
that workers report, and says itself only whether a session at rest waits for a tool.

                 SUBMIT            ADMIT
    IDLE ───────────────▶ WAITING ───────▶ RUNNING ──▶ END ──▶ IDLE
     ▲ │ AWAIT_TOOL          ▲               │ ▲
     │ ▼                     │ SUBMIT        │ │ ADMIT
    WAITING_TOOL ────────────┘      PREEMPT  ▼ │
                                        PREEMPTED          CLOSE: any ──▶ FINISHED
"""

from __future__ import annotations

from enum import Enum, auto

from agentserve.types import SessionState


class Phase(Enum):
    IDLE = auto()
    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    WAITING_TOOL = auto()
    FINISHED = auto()


class Happening(Enum):
    SUBMIT = auto()  # a turn begins
    ADMIT = auto()  # it gets a seat and pages
    PREEMPT = auto()  # it loses them, and keeps its tokens
    END = auto()  # it completes, fails, is aborted or refused
    AWAIT_TOOL = auto()  # its reply was a tool call
    RELEASE = auto()  # the wait is over without a result
    CLOSE = auto()


class TransitionError(RuntimeError):
    """An event that the present phase does not allow: a fault of the caller."""


TRANSITIONS: dict[tuple[Phase, Happening], Phase] = {
    (Phase.IDLE, Happening.SUBMIT): Phase.WAITING,
    (Phase.WAITING_TOOL, Happening.SUBMIT): Phase.WAITING,
    (Phase.WAITING, Happening.ADMIT): Phase.RUNNING,
    (Phase.PREEMPTED, Happening.ADMIT): Phase.RUNNING,
    (Phase.RUNNING, Happening.PREEMPT): Phase.PREEMPTED,
    (Phase.RUNNING, Happening.END): Phase.IDLE,
    (Phase.WAITING, Happening.END): Phase.IDLE,
    (Phase.PREEMPTED, Happening.END): Phase.IDLE,
    (Phase.IDLE, Happening.AWAIT_TOOL): Phase.WAITING_TOOL,
    (Phase.WAITING_TOOL, Happening.RELEASE): Phase.IDLE,
    (Phase.IDLE, Happening.CLOSE): Phase.FINISHED,
    (Phase.WAITING_TOOL, Happening.CLOSE): Phase.FINISHED,
}

_PUBLIC = {
    Phase.IDLE: SessionState.IDLE,
    Phase.WAITING: SessionState.WAITING,
    Phase.PREEMPTED: SessionState.PREEMPTED,
    Phase.WAITING_TOOL: SessionState.WAITING_TOOL,
    Phase.FINISHED: SessionState.FINISHED,
}


def after(phase: Phase, happening: Happening) -> Phase:
    """The next phase, or TransitionError."""
    try:
        return TRANSITIONS[phase, happening]
    except KeyError:
        raise TransitionError(f"{happening.name} is not possible in {phase.name}") from None


def public_state(phase: Phase, lag: int) -> SessionState:
    """The state to show. lag: tokens of the session that are not computed yet."""
    if phase is Phase.RUNNING:
        return SessionState.PREFILLING if lag > 1 else SessionState.DECODING
    return _PUBLIC[phase]
