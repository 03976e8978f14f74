"""Which files a server records into: one series of requests, and one of iterations for each worker."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from agentserve.clock import Clock
from agentserve.core.timing.fingerprint import Fingerprint
from agentserve.messages import Hello
from agentserve.records.lines import Opened
from agentserve.records.writer import Bounds, LineWriter
from tiering.stores.private import FILE, make_folder

_LOCK = "lock"


class FolderTaken(ValueError):
    """Another server records into the folder; one line for the operator."""


def requests_writer(folder: Path, bounds: Bounds, hello: Hello, model: str, clock: Clock) -> LineWriter:
    """Of the API process."""
    return LineWriter(folder / "requests.jsonl", bounds, lambda: _opened(hello, model, clock))


def iterations_writer(
    folder: Path,
    bounds: Bounds,
    hello: Hello,
    model: str,
    clock: Clock,
    *,
    worker: int,
    groups: Sequence[str],
    step_tokens: int,
    fingerprint: Fingerprint | None = None,
) -> LineWriter:
    """Of one worker. fingerprint: whose steps these are, for who fits to them."""

    def opened() -> Opened:
        line = _opened(hello, model, clock, worker=worker, groups=tuple(groups), step_tokens=step_tokens)
        return msgspec.structs.replace(line, fingerprint=fingerprint)

    return LineWriter(folder / f"iterations.w{worker}.jsonl", bounds, opened)


def _opened(
    hello: Hello,
    model: str,
    clock: Clock,
    *,
    worker: int | None = None,
    groups: tuple[str, ...] = (),
    step_tokens: int = 0,
) -> Opened:
    return Opened(
        at_ts=clock.now(),
        unix=time.time(),
        model=model,
        policy=hello.policy,
        worker=worker,
        groups=groups,
        page_size=hello.page_size,
        step_tokens=step_tokens,
        machine={
            "backend": hello.backend,
            "device": hello.device,
            "dtype": hello.dtype,
            "weights": hello.weights,
            "weights_digest": hello.weights_digest,
            "activations": hello.activations,
            "kv_dtype": hello.kv_dtype,
            "pages": hello.pages,
        },
    )


@contextmanager
def claimed(folder: Path | None) -> Iterator[None]:
    """While this server records there: no other one may. A folder in which nothing can be written is
    nobody's; whoever tries to write says so. Raises FolderTaken."""
    lock = -1 if folder is None else _lock(folder)
    try:
        yield
    finally:
        if lock >= 0:
            os.close(lock)


def _lock(folder: Path) -> int:
    try:
        make_folder(folder)
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE)
    except OSError:
        return -1
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise FolderTaken(f"{folder}: another server records into it") from None
    except OSError:  # a file system that has no locks
        pass
    return lock
