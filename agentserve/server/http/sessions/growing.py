"""Tells a session's worker what is certain of its next prompt while a tool's output still grows."""

from __future__ import annotations

import asyncio
import logging
import math
from array import array
from collections.abc import Sequence

from agentserve.messages import ToolSignal, pack_tokens
from agentserve.server.errors import ApiError
from agentserve.server.http.chat_request import template_of
from agentserve.server.http.claims import cut_calls
from agentserve.server.http.context import ServerContext
from agentserve.server.http.sessions.certain import Certain
from agentserve.server.http.sessions.taking import outstanding
from agentserve.server.sessions.session_record import Session
from agentserve.server.sessions.transcript import Transcript, read_messages
from agentserve.types import TurnId
from tiering.policy.base import Signal

log = logging.getLogger(__name__)

FIRST_CHARS = 512  # less is not worth a chunk of prefill
STEP_CHARS = 2048
GROWTH = 1.5  # each time the whole prompt is rendered anew
PAUSE = 0.1  # seconds without a piece, after which less growth is told, too
PAUSE_CHARS = 256
PAUSE_SHARE = 0.2  # of all that has come: the longer it is, the more a rendering costs


class Growing:
    """Tells a session's worker of the growing result of one call. Nobody relies on it, and it holds up
    nobody: it renders beside the upload, and leaves out what came meanwhile."""

    def __init__(self, context: ServerContext, session: Session, call: str) -> None:
        self._context = context
        self._session = session
        self._call = call
        self._certain = Certain()
        self._parts: Sequence[str] = ()
        self._size = 0
        self._told = 0  # characters that had come when it was last rendered
        self._next: float = FIRST_CHARS
        self._work: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def signal(self, signal: Signal, tokens: array[int] | None = None) -> None:
        """Early news for the worker; not of a session that it does not know to wait."""
        session = self._session
        turn = session.engine_turn
        if turn is None or session.running is not None or self._context.directory.find(session.key) is None:
            return
        packed = b"" if tokens is None else pack_tokens(tokens)
        self._context.engine.tell(ToolSignal(session.key, turn, signal, packed))

    def grown(self, parts: Sequence[str], size: int) -> None:
        """The result has `size` characters by now, `parts` joined."""
        self._parts, self._size = parts, size
        if size >= self._next:
            self._render()
        self._wait_for_a_pause()

    def _wait_for_a_pause(self) -> None:
        """A tool that thinks between its lines leaves the time to compute those that have come."""
        if self._timer is not None:
            self._timer.cancel()
        worth = max(PAUSE_CHARS, self._size * PAUSE_SHARE)
        if self._size >= FIRST_CHARS and self._size - self._told >= worth and self._next < math.inf:
            self._timer = asyncio.get_running_loop().call_later(PAUSE, self._paused)

    def _paused(self) -> None:
        if not self._render():
            self._wait_for_a_pause()

    def _render(self) -> bool:
        """Begin to tell what has come. False if the last time is not over."""
        if self._work is not None and not self._work.done():
            return False
        size = self._size
        kept = self._context.chronicle.transcripts.get(self._session.key)
        if kept is not None and outstanding(self._session, kept)[:1] == [self._call]:
            self._told, self._next = size, max(int(size * GROWTH), size + STEP_CHARS)
            turn = self._session.engine_turn
            self._work = asyncio.create_task(self._tell(kept, turn, "".join(self._parts)))
        return True  # else what stands before it in the prompt is not known yet

    async def end(self, *, broken: bool = False) -> None:
        """No signal comes after this. broken: nor does the result, as far as is known; what was to be
        computed of the prompt with it need not be."""
        if self._timer is not None:
            self._timer.cancel()
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)
            if broken:
                self.signal(Signal.BROKEN)

    async def _tell(self, kept: Transcript, turn: TurnId | None, text: str) -> None:
        context, session = self._context, self._session
        try:
            said = await context.off_loop(read_messages, kept.messages)
            tokens = await context.off_loop(
                self._certain.tokens,
                template_of(context, session.tenant),
                kept,
                calls=list(session.pending),
                growing=self._call,
                text=text,
                cut=cut_calls(context, session.tenant, said),
                written=context.tool_parser.written,
                spliced=dict(session.replies),
                tails=dict(session.tails),
                limits=context.options.limits,
            )
        except ApiError:
            return  # the end of the upload will tell
        except Exception:
            self._next = math.inf
            log.exception("what is certain of a growing result cannot be told; no more of it is")
            return
        most = context.facts.max_model_len
        if len(tokens) >= most:
            self._next = math.inf  # such a prompt is refused: the worker need not go on either
        if len(tokens) > session.length and session.engine_turn == turn:
            self.signal(Signal.STREAMING, tokens[:most])
