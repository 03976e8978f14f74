"""The other ranks of a worker's tensor-parallel group: started by it, agreed with, and watched.

A follower that ends takes the worker with it, which is then replaced as any that died; one whose worker dies
is killed by the system, or sees the end of its standard input.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import IO, BinaryIO, cast

import msgspec
import torch

from agentserve.clock import WallClock
from agentserve.executor.collectives import Collectives, connect
from agentserve.executor.group import read_frame, write_frame
from agentserve.server.workers.spec import WorkerSpec
from agentserve.server.workers.supervisor import private_directory

log = logging.getLogger("agentserve.worker")

FOLLOWER_COMMAND = (sys.executable, "-P", "-m", "agentserve.server.workers.follower")
GRACE = 5.0  # seconds that followers have to leave by themselves


class Orders(msgspec.Struct, frozen=True, tag="orders"):
    """The first that a follower reads. Holds nothing secret."""

    spec: WorkerSpec
    rank: int
    leader: int  # process id of rank 0; the follower does not outlive it
    meeting: str  # the file over which the ranks find each other


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """All have their weights: take memory for so many pages, and meet."""

    pages: tuple[int, ...]


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """A follower has its weights. `pages`: what its device has room for."""

    digest: str
    pages: tuple[int, ...]
    weight_bytes: int


class Following(msgspec.Struct, frozen=True, tag="following"):
    """It waits for plans."""


class CannotFollow(msgspec.Struct, frozen=True, tag="cannot"):
    """It could not be started: why, in one line."""

    error: str


Order = Orders | Begin
Answer = Loaded | Following | CannotFollow

_orders = msgspec.msgpack.Decoder(Order)
_answers = msgspec.msgpack.Decoder(Answer)


def send(pipe: BinaryIO, message: Order | Answer) -> None:
    write_frame(pipe, msgspec.msgpack.encode(message))


def receive_order(pipe: BinaryIO) -> Order | None:
    """None: the leader is gone."""
    body = read_frame(pipe)
    return None if body is None else _orders.decode(body)


class Followers:
    """Ranks 1 and up of this worker's group. Used by the main thread, whose children they are."""

    def __init__(self, spec: WorkerSpec, command: Sequence[str] = FOLLOWER_COMMAND) -> None:
        """Starts them: they load their weights while this rank loads its own. OSError, and none is left,
        where the system has no room for one."""
        self._degree = spec.tensor_parallel
        self._closing = threading.Event()
        self._stack = ExitStack()
        self._meeting = self._stack.enter_context(private_directory()) / "meeting"
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(1, self._degree):
                self._processes.append(self._start(spec, rank, command))
        except OSError:
            self.close(0.0)
            raise

    @property
    def pipes(self) -> list[BinaryIO]:
        """Where plans are written to."""
        return [_pipe(process.stdin) for process in self._processes]

    def loaded(self, digest: str, pages: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """Wait until all have their weights. How many pages all devices have room for, and the bytes of
        the followers' weights. ValueError, one line, where one cannot follow."""
        nbytes = 0
        for process in self._processes:
            answer = self._answer(process)
            assert isinstance(answer, Loaded)
            if answer.digest != digest:
                raise ValueError("the model's files changed while ranks read them")
            pages = tuple(map(min, pages, answer.pages))
            nbytes += answer.weight_bytes
        return pages, nbytes

    def meet(self, pages: tuple[int, ...], device: torch.device) -> Collectives:
        """Have them take their memory, and connect all ranks. From here on their end is the worker's."""
        for process in self._processes:
            send(_pipe(process.stdin), Begin(pages))
        for rank, process in enumerate(self._processes, 1):
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()
        ranks = connect(self._meeting, 0, self._degree, device)
        self._stack.close()  # the place of meeting is not needed any more
        return ranks

    def wait(self) -> None:
        """Until all wait for plans. ValueError, one line, where one cannot follow."""
        for process in self._processes:
            self._answer(process)

    def close(self, grace: float = GRACE) -> None:
        """End them; they have so many seconds to leave by themselves."""
        self._closing.set()
        self._stack.close()
        for process in self._processes:
            with suppress(OSError):
                _pipe(process.stdin).close()
        deadline = WallClock().now() + grace
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - WallClock().now()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _pipe(process.stdout).close()

    def _start(self, spec: WorkerSpec, rank: int, command: Sequence[str]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with suppress(OSError):  # it died: its answer is missing
            send(_pipe(process.stdin), Orders(spec, rank, os.getpid(), str(self._meeting)))
        return process

    def _answer(self, process: subprocess.Popen[bytes]) -> Answer:
        body = read_frame(_pipe(process.stdout))
        if body is None:
            raise ValueError(f"a rank died before it was ready (exit status {process.wait()})")
        answer = _answers.decode(body)
        if isinstance(answer, CannotFollow):
            raise ValueError(answer.error)
        return answer

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """On a thread of its own: the main one may be waiting for this very rank."""
        status = process.wait()
        if not self._closing.is_set():
            log.error("rank %d of %d ended (status %d), and this worker with it", rank, self._degree, status)
            os._exit(1)


def _pipe(file: IO[bytes] | None) -> BinaryIO:
    return cast(BinaryIO, file)  # both are pipes of ours
