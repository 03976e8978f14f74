"""Whether a tool result fits its session: bound to (session, call id, epoch), taken once.

A repeat of a result that was taken is no error and does nothing, so a client whose connection broke
sends it again. Anything else that comes for a call that has its result is a conflict, and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from agentserve.server.errors import ApiError
from agentserve.server.sessions.session_record import Session
from agentserve.server.sessions.transcript import Held, Transcript, result_digest
from agentserve.text.errors import TextError

NO_RESULT = "No result: the call was cancelled."
"""What the model reads where the client goes on without a call's result."""

Content = str | list[dict[str, object]]


@dataclass(frozen=True, slots=True)
class Incoming:
    """A result as a client sent it, its content checked."""

    call: str
    content: Content
    digest: bytes
    epoch: int | None

    @classmethod
    def checked(cls, call: str, content: Content, epoch: int | None, param: str) -> Incoming:
        try:
            digest = result_digest(content)
        except TextError as error:
            told = str(error).partition(": ")[2] or str(error)
            raise ApiError(f"{param}.content: {told}", param=f"{param}.content", code=error.code) from None
        return cls(call, content, digest, epoch)


@dataclass(frozen=True, slots=True)
class Taking:
    """What a request's results come to."""

    fresh: dict[str, Held]
    repeats: tuple[str, ...]


def sort_out(session: Session, kept: Transcript | None, results: Sequence[Incoming]) -> Taking:
    """All of a request's results against what the session waits for: all fit, or an ApiError."""
    fresh: dict[str, Held] = {}
    repeats: list[str] = []
    for result in results:
        earlier = fresh.get(result.call)
        if earlier is not None:
            if earlier.digest != result.digest:
                raise _conflict(session, result)
        elif _is_repeat(session, kept, result):
            repeats.append(result.call)
        else:
            content = msgspec.json.encode(result.content)
            fresh[result.call] = Held(content, result.digest, session.epoch)
    if fresh and kept is None:
        raise transcript_gone(session)
    return Taking(fresh, tuple(repeats))


def _is_repeat(session: Session, kept: Transcript | None, result: Incoming) -> bool:
    """True: it was taken before. False: it is taken now. Else it does not fit, and raises."""
    known = (kept.held.get(result.call) or kept.answers.get(result.call)) if kept else None
    if known is not None:
        if result.epoch is not None and result.epoch not in (known.epoch, session.epoch):
            raise _stale(session, result)
        if known.digest == result.digest:
            return True
        held = isinstance(known, Held) and session.running is None
        if held and result.epoch == session.epoch != known.epoch:
            return False  # the turn with the old result failed, and this one is for the time after that
        raise _conflict(session, result)
    if result.call not in session.issued:
        raise ApiError(
            f"{result.call[:80]!r} is no tool call of this session.",
            status=404,
            param="call_id",
            code="unknown_tool_call",
        )
    if result.call not in session.pending:
        runs = session.issued[result.call]
        raise ApiError(
            f"The session went on without a result for {result.call[:80]!r}."
            if runs
            else f"{result.call[:80]!r} is of a reply that was cut; it takes no result.",
            status=409,
            param="call_id",
            code="session_went_on" if runs else "incomplete_tool_call",
        )
    if result.epoch is not None and result.epoch != session.epoch:
        raise _stale(session, result)
    if session.running is not None:
        raise turn_running(session)
    return False


def outstanding(session: Session, kept: Transcript | None) -> list[str]:
    """The calls that have no result yet, in call order."""
    held = kept.held if kept else {}
    return [call for call in session.pending if call not in held]


def turn_running(session: Session) -> ApiError:
    return ApiError(
        "A turn of this session is running.",
        status=409,
        code="turn_running",
        headers={"retry-after": "1"},
        details={"turn": session.running, "epoch": session.epoch},
    )


def went_on(session: Session) -> ApiError:
    return ApiError(
        "Another turn of this session came first; send the results again to learn what it took.",
        status=409,
        code="session_went_on",
        details={"epoch": session.epoch},
    )


def transcript_gone(session: Session) -> ApiError:
    return ApiError(
        "The session's messages are no longer kept here; go on with a chat completion that has them.",
        status=409,
        code="messages_not_kept",
        details={"epoch": session.epoch},
    )


def _conflict(session: Session, result: Incoming) -> ApiError:
    return ApiError(
        f"{result.call[:80]!r} has another result already.",
        status=409,
        param="content",
        code="result_conflict",
        details={"epoch": session.epoch},
    )


def _stale(session: Session, result: Incoming) -> ApiError:
    return ApiError(
        f"epoch: {result.epoch} is not the session's, which is {session.epoch}.",
        status=409,
        param="epoch",
        code="stale_epoch",
        details={"epoch": session.epoch},
    )
