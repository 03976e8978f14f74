"""The process that makes and compiles grammars. It may be killed, run out of memory or overflow its stack at
any time.

Neither rewriting a schema nor xgrammar has a bound of time or memory on what clients send, so nothing else
does them.
Started by `CompileProcess`; ends when its input does.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

from tools_bridge.compile_messages import At, Job, Made, Vocabulary, receive, send
from tools_bridge.cpu_guard import CpuGuard
from tools_bridge.reply_request import source_of
from tools_bridge.schemas import GrammarError
from tools_bridge.source_compiler import TOO_MUCH_MEMORY, SourceCompiler, Uncompilable, no_memory, placed


def main() -> None:
    jobs, replies = _pipes()
    wanted = receive(jobs, Vocabulary)
    if wanted is None:
        return
    try:
        compiler = SourceCompiler(wanted.token_bytes, wanted.vocab_size, wanted.stop_token_ids, CpuGuard())
    except ValueError as error:
        send(replies, Made(error=str(error)))
        return
    limit = _limit_memory(wanted.memory_bytes)
    send(replies, Made())
    _silence()
    while (job := receive(jobs, Job)) is not None:
        # The default action of SIGALRM ends the process, also in the middle of native code.
        signal.setitimer(signal.ITIMER_REAL, job.seconds)
        made = _made(compiler, job, lambda place: send(replies, At(place)))
        signal.setitimer(signal.ITIMER_REAL, 0)
        # Memory that malloc keeps counts against the limit; the next schema must not pay for it.
        last = made.last or (limit is not None and _address_space() > limit)
        send(replies, msgspec.structs.replace(made, last=last))
        if last:
            return


def _made(compiler: SourceCompiler, job: Job, tell: Callable[[str], None]) -> Made:
    place = ""

    def at(now: str) -> None:
        nonlocal place
        place = now
        tell(now)

    try:
        source = source_of(job.request, job.let_go)
        if source is None:
            return Made()
        return Made(compiler.compile(source, at), left_out=source.left_out)
    except Uncompilable as error:
        return Made(error=str(error), compiling=True, place=error.place)
    except GrammarError as error:
        return Made(error=str(error))
    except RecursionError:
        return Made(error=placed(place, "the schema is nested too deeply"), compiling=True, place=place)
    except Exception as error:
        full = isinstance(error, MemoryError) or no_memory(error)
        why = TOO_MUCH_MEMORY if full else f"the schema cannot be compiled: {type(error).__name__}"
        return Made(error=placed(place, why), compiling=True, place=place, last=full)


def _pipes() -> tuple[BinaryIO, BinaryIO]:
    """(jobs, replies). What native code prints must not get among the replies."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return sys.stdin.buffer, replies


def _silence() -> None:
    """From here on, messages on stderr are about what clients sent: they are not for the server's log."""
    with Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)


def _limit_memory(more: int) -> int | None:
    """Allow `more` bytes from here on; the size at which to end. None where memory cannot be limited."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is expected, its dump is no use
    if not sys.platform.startswith("linux"):
        return None
    now = _address_space()
    resource.setrlimit(resource.RLIMIT_AS, (now + more, now + more))
    return now + more // 4


def _address_space() -> int:
    pages = Path("/proc/self/statm").read_text().split()[0] if sys.platform.startswith("linux") else "0"
    return int(pages) * resource.getpagesize()


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # the server was killed: nobody reads this, and no log wants it
        os._exit(1)
