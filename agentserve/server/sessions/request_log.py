"""What became of requests: counted for `/metrics`, and written down where there is a recording.

Each choice of a request is a turn and has a line; a request that got none has one, too, unless it came from
a stranger: those are in the audit log, where they push out nobody else's.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable

from agentserve.clock import Clock
from agentserve.messages import StateChange, Submit, TurnEnded, TurnUsage
from agentserve.records.lines import RequestRecord, Status
from agentserve.records.writer import LineWriter
from agentserve.request_metrics import RequestMetrics, TenantTurns
from agentserve.server.engine_port import EngineDown
from agentserve.server.sessions.errors import (
    SessionClosed,
    StorageFailed,
    TurnCancelled,
    TurnFailed,
    TurnRefused,
)
from agentserve.server.sessions.origin import Origin
from agentserve.types import NO_SLO, FinishReason, SessionId, SessionState, Slo, TurnId

SERIES = "requests"
_BY_ERROR: tuple[tuple[type[BaseException], Status, str], ...] = (
    (TurnRefused, Status.REJECTED, "request_refused"),
    (EngineDown, Status.REJECTED, "no_worker"),
    (SessionClosed, Status.CANCELLED, "session_closed"),
    (TurnCancelled, Status.CANCELLED, "turn_cancelled"),
    (TurnFailed, Status.ERROR, "engine_error"),
    (StorageFailed, Status.ERROR, "storage_failed"),
)
_WELL = (Status.COMPLETED, Status.LENGTH)
_ADMITTED = (SessionState.PREFILLING, SessionState.DECODING)
CLIENT_GONE = 499


class Course:
    """One turn, from when it was asked for until it is over."""

    def __init__(
        self,
        row: TenantTurns,
        origin: Origin | None,
        arrived: float,
        tenant: str,
        name: tuple[SessionId, TurnId],
    ) -> None:
        self.row = row
        self.tenant = tenant
        self.session, self.turn = name
        self.request = "" if origin is None else origin.request
        self.route = "" if origin is None else origin.route
        self.arrived = arrived
        self.submitted: float | None = None
        self.admitted: float | None = None
        self.first: float | None = None
        self.last = arrived
        self.gaps = array("d")  # ms
        self._at = 0.0  # ms from its arrival to its last token, as the gaps add up
        self.preemptions = 0
        self._preempted = False
        self.prompt = 0
        self.slo: Slo = NO_SLO
        self.usage: TurnUsage | None = None
        self.status: Status | None = None
        self.reason = ""
        self.finished = 0.0

    def submit(self, command: Submit, now: float) -> None:
        self.submitted, self.slo = now, command.slo
        self.prompt = len(command.tokens) // 4 - command.generated

    def change(self, change: StateChange) -> None:
        if change.state in _ADMITTED and self.admitted is None:
            self.admitted = max(change.at, self.submitted or self.arrived)
        preempted = change.state is SessionState.PREEMPTED
        self.preemptions += preempted and not self._preempted
        self._preempted = preempted

    def token(self, now: float) -> None:
        """A token leaves for the client."""
        gap, at = max(now - self.last, 0.0), round((now - self.arrived) * 1e3, 3)
        self.gaps.append(max(round(at - self._at, 3), 0.0))
        self._at = at
        if self.first is None:
            self.first = now
        else:
            self.row.tbt.observe(gap)
        self.last = now

    def ended(self, event: TurnEnded) -> None:
        """The engine's last word. Its times and counts are those of the turn's usage."""
        usage = self.usage = event.usage
        self.preemptions = usage.preemptions
        if usage.generated:
            self.admitted = max(usage.admitted, self.submitted or self.arrived)
        if event.reason is FinishReason.SHED:
            self.status, self.reason = Status.SHED, event.reason.value

    def done(self, reason: FinishReason, now: float) -> None:
        """Its client has an answer."""
        self.status = Status.LENGTH if reason is FinishReason.LENGTH else Status.COMPLETED
        self.reason, self.finished = reason.value, now

    def failed(self, error: BaseException, now: float) -> None:
        """It has none."""
        self.finished = now
        if self.status is None:
            self.status, self.reason = _became(error)

    @property
    def kept(self) -> bool | None:
        """Whether all that was promised was kept, by the engine's verdict. None: nothing was promised, or its
        client ended it."""
        if self.slo == NO_SLO or self.status is Status.CANCELLED:
            return None
        return self.status in _WELL and self.usage is not None and not self.usage.missed


class RequestLog:
    """Counts and writes. On the event loop; nothing here waits."""

    def __init__(
        self,
        metrics: RequestMetrics,
        clock: Clock,
        *,
        policy: str = "",
        writer: LineWriter | None = None,
        secret: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """secret: whether a name that a client gave may be a key, or a part of one."""
        self.metrics = metrics
        self._clock = clock
        self._policy = policy
        self._writer = writer
        self._secret = secret

    def begin(
        self, origin: Origin | None, arrived: float, tenant: str, key: SessionId, turn: TurnId
    ) -> Course:
        return Course(self.metrics.of(tenant), origin, arrived, tenant, (key, turn))

    def over(self, course: Course) -> None:
        """A turn has ended, in whichever way."""
        row, status = course.row, course.status
        if status is None:  # it was never begun
            course.failed(asyncio.CancelledError(), self._clock.now())
            status = course.status
        assert status is not None
        row.ended[status.value] = row.ended.get(status.value, 0) + 1
        if course.first is not None:
            row.ttft.observe(max(course.first - course.arrived, 0.0))
        if course.admitted is not None:
            row.queue.observe(max(course.admitted - course.arrived, 0.0))
        row.preemptions += course.preemptions
        if course.usage is not None:
            row.cached_tokens += max(course.usage.cached, 0)
        if status in (Status.REJECTED, Status.SHED):
            self.metrics.rejected(course.reason)
        if self._writer is not None:
            self._writer.add(self._line(course, status, course.kept))

    def over_limit(self, course: Course) -> None:
        """A tenant may not have so many turns at once: it was not begun."""
        course.status, course.reason = Status.REJECTED, "over_limit"
        course.finished = self._clock.now()
        self.over(course)

    def refused(self, origin: Origin, tenant: str | None, http_status: int) -> None:
        """A request for a turn that got none was answered with this. tenant: None, of a stranger."""
        reason = origin.refusal or f"http_{http_status}"
        status = Status.REJECTED
        if http_status == CLIENT_GONE:
            status, reason = Status.CANCELLED, "client_gone"
        elif http_status >= 500 and http_status != 503:
            status = Status.ERROR
        else:
            self.metrics.rejected(reason)
        if tenant is None:
            return
        name = (SessionId(""), TurnId(0))
        course = Course(self.metrics.of(tenant), origin, origin.arrived, tenant, name)
        course.status, course.reason, course.finished = status, reason, self._clock.now()
        course.row.ended[status.value] = course.row.ended.get(status.value, 0) + 1
        if self._writer is not None:
            self._writer.add(self._line(course, status, None))

    @property
    def lost(self) -> int | None:
        """Lines that could not be written; None where nothing is recorded."""
        return None if self._writer is None else self._writer.lost

    def close(self) -> None:
        """Write what is waiting. Blocks."""
        if self._writer is not None:
            self._writer.close()

    def _line(self, course: Course, status: Status, kept: bool | None) -> RequestRecord:
        usage = course.usage
        secret = self._secret(course.request)
        return RequestRecord(
            request="(not shown)" if secret else course.request,
            route=course.route,
            tenant=course.tenant,
            session=course.session,
            turn=course.turn,
            policy=self._policy,
            status=status,
            reason=course.reason,
            arrival_ts=_rounded(course.arrived),
            submit_ts=None if course.submitted is None else _rounded(course.submitted),
            admit_ts=None if course.admitted is None else _rounded(course.admitted),
            first_token_ts=None if course.first is None else _rounded(course.first),
            every_token_ts=tuple(course.gaps),
            finish_ts=_rounded(course.finished),
            prompt_tokens=course.prompt,
            prefix_hit_tokens=None if usage is None else usage.cached,
            output_tokens=len(course.gaps),
            computed_tokens=None if usage is None else usage.computed,
            preemption_count=course.preemptions,
            queue_reasons={} if usage is None else usage.held,
            slo=None if course.slo == NO_SLO else course.slo,
            slo_met=kept,
        )


def _rounded(at: float) -> float:
    return round(at, 6)  # microseconds


def _became(error: BaseException) -> tuple[Status, str]:
    if isinstance(error, asyncio.CancelledError):  # without a word: whoever wanted it has gone
        return Status.CANCELLED, "cancelled" if str(error) else "client_gone"
    for kind, status, reason in _BY_ERROR:
        if isinstance(error, kind):
            return status, reason
    return Status.ERROR, "internal_error"
