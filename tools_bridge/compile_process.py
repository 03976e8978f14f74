"""A child process that compiles, as its parent holds it."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import BinaryIO

from tools_bridge.compile_messages import At, Job, Made, receive_reply, send, send_encoded
from tools_bridge.compile_shares import CompilerUnavailable
from tools_bridge.repetitions import AMBIGUOUS
from tools_bridge.reply_request import GrammarRequest
from tools_bridge.schemas import GrammarError

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "tools_bridge.compile_child")
START_SECONDS = 60.0  # importing xgrammar, and torch with it, on a busy machine
MOST_LISTED = 20  # places in one line of the log
ORPHAN_SECONDS = 5.0  # longer than the deadline a child runs whose parent is gone


class NotCompiled(GrammarError):
    """A schema says what it may, but there is no grammar of it. `place`: of that schema, if it is known."""

    def __init__(self, place: str, why: str) -> None:
        super().__init__(why if not place or why.startswith(place) else f"{place}: {why}")
        self.place = place


class TooSlow(NotCompiled):
    """It was given up: on a machine with less to do it may be made in time."""


class TooAmbiguous(NotCompiled):
    """So much that the process which tried it was ended for it."""


class CompileProcess:
    """One child; one thread at a time. `vocabulary` is an encoded `Vocabulary`."""

    def __init__(self, vocabulary: bytes) -> None:
        self._process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # an interrupt at the terminal is for the server
        )
        self.usable = True
        self._place = ""  # of what is being compiled
        made, _ = self._ask(vocabulary, START_SECONDS)
        if made is None or made.error:
            self.close()
            raise CompilerUnavailable(f"the schema compiler does not start{_because(made)}")

    def compile(self, wanted: GrammarRequest, seconds: float, let_go: Mapping[str, str]) -> str:
        """The compiled grammar, or "" where any text will do. `let_go`: see `reply_grammar`. The child may be
        gone then: see `usable`. NotCompiled, GrammarError."""
        made, late = self._ask(Job(seconds + ORPHAN_SECONDS, wanted.data, dict(let_go)), seconds)
        if late or made is None or made.last:
            self.close()
        if made is None and late:
            raise TooSlow(self._place, f"the schema took longer than {seconds:g} s to compile; simplify it")
        if made is None and self._process.wait() == -signal.SIGPROF:
            raise TooAmbiguous(self._place, AMBIGUOUS)
        if made is None:
            raise NotCompiled(
                self._place, "the schema cannot be compiled: it is too large or nested too deeply"
            )
        if made.compiling:
            raise NotCompiled(made.place, made.error)
        if made.error:
            raise GrammarError(made.error)
        if made.left_out:
            log.info("not held, in a schema that is not strict: %s", _listed(made.left_out))
        return made.text

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """From any thread: what is being compiled fails at once. Whoever waits for that closes."""
        self._process.kill()

    def close(self) -> None:
        self.usable = False
        self._process.kill()
        self._process.wait()
        for pipe in self._pipes():
            with suppress(BrokenPipeError):  # something was still to be written
                pipe.close()

    def _ask(self, message: Job | bytes, seconds: float) -> tuple[Made | None, bool]:
        """(the reply or None if the child ended without one, whether it was killed for being late)."""
        jobs, replies = self._pipes()
        with self._killed_after(seconds) as late:
            try:
                if isinstance(message, bytes):
                    send_encoded(jobs, message)
                else:
                    send(jobs, message)
                self._place = ""
                while isinstance(said := receive_reply(replies), At):
                    self._place = said.place
                made = said
            except BrokenPipeError:
                made = None
        return made, late.is_set()

    @contextmanager
    def _killed_after(self, seconds: float) -> Iterator[threading.Event]:
        late = threading.Event()

        def kill() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(seconds, kill)
        timer.daemon = True
        timer.start()
        try:
            yield late
        finally:
            timer.cancel()
            timer.join()  # a kill under way must be seen in `late`

    def _pipes(self) -> tuple[BinaryIO, BinaryIO]:
        jobs, replies = self._process.stdin, self._process.stdout
        assert jobs is not None
        assert replies is not None
        return jobs, replies  # type: ignore[return-value]


def _listed(left_out: Sequence[str]) -> str:
    """In one line; names in it are a client's."""
    more = f", and {len(left_out) - MOST_LISTED} more" if len(left_out) > MOST_LISTED else ""
    return ", ".join(ascii(place[:200])[1:-1] for place in left_out[:MOST_LISTED]) + more


def _because(made: Made | None) -> str:
    return "" if made is None else f": {made.error}"
