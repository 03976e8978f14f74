"""Where matchers of grammars run: in a process that may hang or crash, and is replaced in milliseconds.

xgrammar bounds neither the time nor the memory of a call, and nothing in a process can end one. So a worker
forks a host before it has threads or a device. The host reads the vocabulary once and forks a matcher
from itself whenever it is asked, ending the one before. A matcher that is at a token for longer than its
turn's time is ended by the system, by its own timer of CPU time: a machine that is busy blames nobody.
They end with the worker, and matchers with their host.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Generic, NamedTuple, NoReturn, TypeVar

import msgspec

from agentserve.executor.grammars import GrammarFold, GrammarStore, GrammarTooSlow
from tools_bridge.cpu_guard import CpuGuard

DEFINE_SECONDS = 5.0  # of CPU, to read a compiled grammar of the largest size
NO_MEMORY = 77  # the exit status for want of it
_BUFFER = 64 * 1024
_PR_SET_PDEATHSIG = 1


class Vocabulary(msgspec.Struct, frozen=True, tag=1):
    """The first word to a host: see `GrammarVocabulary`."""

    token_bytes: list[bytes]
    vocab_size: int
    stop_token_ids: list[int]
    max_bytes: int  # see `GrammarStore`
    memory_bytes: int  # for a matcher, on top of what the host has


class Spawn(msgspec.Struct, frozen=True, tag=2):
    """Every other: a new matcher is wanted. Answered by how the one before ended (as
    `os.waitstatus_to_exitcode` has it) and the new one's id, in digits, and beside that its socket."""


class Define(msgspec.Struct, frozen=True, tag=1):
    grammar: str
    compiled: str


class Drop(msgspec.Struct, frozen=True, tag=2):
    """Not answered."""

    grammar: str


class Begin(msgspec.Struct, frozen=True, tag=3):
    fold: int
    grammar: str
    tokens: list[int]


class Push(msgspec.Struct, frozen=True, tag=4):
    fold: int
    token: int


class Leave(msgspec.Struct, frozen=True, tag=5):
    """Nobody needs these folds. Not answered."""

    folds: list[int]


Ask = Define | Drop | Begin | Push | Leave


class Told(msgspec.Struct, frozen=True):
    """The answer: where the fold is now, or why it is not."""

    error: str = ""
    slow: bool = False
    taken: bool = True
    over: bool = False
    bits: bytes = b""  # see `GrammarFold.bits`
    size: int = 0
    memory: int = 0  # bytes that the process grew by when the fold was begun


T = TypeVar("T")


class Line(Generic[T]):
    """Frames over a stream socket; reads `T`s."""

    def __init__(self, link: socket.socket, kind: object) -> None:
        self._link = link
        self._reader = link.makefile("rb", buffering=_BUFFER)
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)

    def send(self, message: msgspec.Struct) -> None:
        data = msgspec.msgpack.encode(message)
        left = memoryview(len(data).to_bytes(4, "little") + data)
        while left:  # the link's time limit is for each piece, not for all: who reads slowly does read
            left = left[self._link.send(left) :]

    def readable(self, seconds: float) -> bool:
        """Whether there is something to receive, or the end, before so long. Not in the middle of a frame."""
        return is_readable(self._link, seconds)

    def receive(self) -> T | None:
        """None at the end, be it in the middle of a frame."""
        head = self._reader.read(4)
        if len(head) < 4:
            return None
        size = int.from_bytes(head, "little")
        data = self._reader.read(size)
        return self._decoder.decode(data) if len(data) == size else None

    def close(self) -> None:
        self._reader.close()
        self._link.close()


class Host(NamedTuple):
    """A child of this process."""

    link: socket.socket
    pid: int


def fork_host() -> Host:
    """Call it while the process has one thread, and no device."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        run_host(theirs)
    theirs.close()
    return Host(ours, pid)


def run_host(link: socket.socket) -> NoReturn:
    """The rest of a process that was started to be one."""
    _leave(link, _host)


def is_readable(link: socket.socket, seconds: float) -> bool:
    poll = select.poll()
    poll.register(link, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def cpu_seconds(pid: int) -> float:
    """That a process has used; 0 where it is gone, or the system does not say."""
    if not sys.platform.startswith("linux"):
        return 0.0
    try:
        return time.clock_gettime((~pid << 3) | 2)  # the kernel's name for the CPU clock of a process
    except OSError:
        return 0.0


def _leave(link: socket.socket, serve: object) -> NoReturn:
    """The rest of a forked process: it has nothing of its parent's but the log and `link`."""
    status = 1
    try:
        _die_with_parent()
        for number in (signal.SIGINT, signal.SIGTERM):  # for the server, which ends its workers, and they us
            signal.signal(number, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.closerange(3, link.fileno())
        os.closerange(link.fileno() + 1, _most_files())
        serve(link)  # type: ignore[operator]
        status = 0
    except MemoryError:
        status = NO_MEMORY
    except (BrokenPipeError, ConnectionResetError):  # the worker is gone: no log wants it
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _die_with_parent() -> None:
    """Also while it is stopped, or has not seen yet that its socket ended."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _most_files() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if limit == resource.RLIM_INFINITY else min(limit, 1 << 20)


def _host(link: socket.socket) -> None:
    line: Line[Vocabulary | Spawn] = Line(link, Vocabulary | Spawn)
    vocabulary = line.receive()
    if not isinstance(vocabulary, Vocabulary):
        return
    guard = CpuGuard()
    store = GrammarStore(
        vocabulary.token_bytes, vocabulary.vocab_size, vocabulary.stop_token_ids, vocabulary.max_bytes,
        guard=guard,
    )  # fmt: skip
    store.prepare()
    child = 0
    while line.receive() is not None:
        status = _end(child)
        near, far = socket.socketpair()
        child = os.fork()
        if child == 0:
            _leave(near, _Matcher(store, guard, vocabulary.memory_bytes).serve)
        near.close()
        socket.send_fds(link, [b"%d %d" % (status, child)], [far.fileno()])
        far.close()
    _end(child)


def _end(child: int) -> int:
    if not child:
        return 0
    os.kill(child, signal.SIGKILL)  # it is not reaped before: nobody else can have its number
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class _Matcher:
    def __init__(self, store: GrammarStore, guard: CpuGuard, memory_bytes: int) -> None:
        self._store = store
        self._guard = guard
        self._memory_bytes = memory_bytes
        self._folds: dict[int, GrammarFold] = {}

    def serve(self, link: socket.socket) -> None:
        _limit_memory(self._memory_bytes)
        line: Line[Ask] = Line(link, Ask)
        while (ask := line.receive()) is not None:
            told = self._told(ask)
            if told is not None:
                line.send(told)

    def _told(self, ask: Ask) -> Told | None:
        try:
            return self._answer(ask)
        except GrammarTooSlow as error:
            return Told(str(error), slow=True)
        except (ValueError, RuntimeError) as error:
            if "bad_alloc" in str(error):
                raise MemoryError from None
            return Told(" ".join(str(error).split()) or type(error).__name__)

    def _answer(self, ask: Ask) -> Told | None:
        match ask:
            case Push(number, token):
                fold = self._folds[number]
                taken = fold.push(token)
                return Told(taken=taken, over=fold.over, bits=fold.bits())
            case Begin(number, grammar, tokens):
                before = _resident_bytes()
                fold = self._store.start(grammar)
                self._folds[number] = fold
                taken = all(fold.push(token) for token in tokens)
                bits, grown = fold.bits(), max(_resident_bytes() - before, 0)
                return Told(taken=taken, over=fold.over, bits=bits, size=fold.size, memory=grown)
            case Leave(numbers):
                for number in numbers:
                    self._folds.pop(number, None)
            case Drop(grammar):
                self._store.drop(grammar)
            case Define(grammar, compiled):
                self._guard.begin(DEFINE_SECONDS)
                try:
                    self._store.define(grammar, compiled)
                finally:
                    self._guard.end()
                return Told()
        return None


def _resident_bytes() -> int:
    """0 where the system does not say."""
    if not sys.platform.startswith("linux"):
        return 0
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _limit_memory(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is expected, its dump is no use
    if sys.platform.startswith("linux"):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
