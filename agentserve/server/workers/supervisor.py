"""One worker process's life as the API process sees it: start, Hello, events, end.

Workers connect to a Unix socket in a private directory; the peer's process id is checked where
the system tells it. `WorkerProcess.start` returns only when the worker is ready to serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from shutil import rmtree

import msgspec

from agentserve.messages import PROTOCOL_VERSION, Command, Event, Hello, Shutdown, StartFailed, StepDone
from agentserve.server.workers.link import ApiLink, LinkError, peer_pid
from agentserve.server.workers.spec import WorkerSpec

log = logging.getLogger(__name__)

# -P: the current directory must not shadow our packages (`kernels` is a common name).
WORKER_COMMAND = (sys.executable, "-P", "-m", "agentserve.server.workers.worker")

# Kernel threads that wait sleep soon: where cores are shared, the ones that spin keep the others from
# working (a decode on two busy cores was 5 to 10 times slower with GNU OpenMP's default of spinning for
# milliseconds). About 20 us of spinning remain, more than the gaps between two parallel regions of a step.
KERNEL_THREADS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}


def worker_environment() -> dict[str, str]:
    """This process's environment with `KERNEL_THREADS`; what the operator has set himself stays."""
    return KERNEL_THREADS | os.environ


_PREFIX, _LOCK = "agentserve-", "lock"
CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV)
"""What a process ends with that trusted damaged memory or files."""


class WorkerFailed(Exception):
    """A worker could not be started; the text is one line for the operator."""

    crashed: bool = False  # of one of CRASHES


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """A directory only this user can enter (mode 0700), removed with everything in it at the end, or where
    this process is killed, by the next that makes one."""
    directory = tempfile.mkdtemp(prefix=_PREFIX)
    if len(directory) > 80:  # a Unix socket's path may have 107 bytes
        os.rmdir(directory)
        directory = tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp")
    made = Path(directory)
    try:
        with open(made / "lock.new", "wb") as lock:  # no child has it, so this process alone holds it
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.rename(made / "lock.new", made / _LOCK)
            _sweep(made.parent)
            yield made
    finally:
        rmtree(directory, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Directories of processes of this user's that were killed."""
    for left in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is held, another's, or gone
            found = left.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                _remove_unheld(left)


def _remove_unheld(directory: Path) -> None:
    with open(directory / _LOCK, "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        rmtree(directory, ignore_errors=True)


class WorkerProcess:
    """A worker that has said Hello. `heard` counts what it has reported since."""

    heard: int = 0

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        link: ApiLink,
        events: AsyncIterator[Event],
        hello: Hello,
    ) -> None:
        self._process = process
        self._link = link
        self._events = events
        self.hello = hello

    @classmethod
    async def start(cls, spec: WorkerSpec, command: Sequence[str] = WORKER_COMMAND) -> WorkerProcess:
        """Start one and wait until it is ready. Raises WorkerFailed; no process is left then."""
        listener = await _listen(Path(spec.socket))
        process = link = None
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                env=worker_environment(),
                start_new_session=True,  # signals meant for us (Ctrl-C) are not for workers
            )
            await _give_orders(process, spec)
            link = await _accept(listener, process)
            events = link.events()
            hello = await _greeting(events, process)
        except BaseException as error:
            if link is not None:
                link.close()
            if process is not None:
                await _kill(process)
            if isinstance(error, LinkError | OSError):
                raise WorkerFailed(f"worker {spec.index}: {error}") from error
            raise
        finally:
            listener.close()
            with suppress(FileNotFoundError):
                os.unlink(spec.socket)
        return cls(process, link, events, hello)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def crashed(self) -> bool:
        """It ended of one of CRASHES."""
        return _crashed(self._process)

    def send(self, command: Command) -> None:
        """Queue one command; never blocks."""
        self._link.send(command)

    async def steps(self) -> AsyncIterator[StepDone]:
        """What the worker reports, until it is gone. A worker that speaks nonsense is gone too."""
        try:
            async for event in self._events:
                if not isinstance(event, StepDone):
                    log.error("worker %d: %s after its Hello", self.pid, type(event).__name__)
                    return
                self.heard += 1
                yield event
        except LinkError as error:
            log.error("worker %d: dropped: %s", self.pid, error)

    def kill(self) -> None:
        """End it at once; `steps` then ends too."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def end(self, grace: float = 0.0) -> str:
        """Make sure it is gone, asking first if `grace` seconds are given; how it ended, for the log."""
        if grace > 0:
            self.send(Shutdown())
        try:
            # Without grace: the socket closes a moment before the process can be reaped, and its
            # own exit status tells more than our SIGKILL.
            async with asyncio.timeout(grace or 0.2):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:
            self._link.close()
            await _kill(self._process)
        return _status(self._process)


async def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        os.chmod(path, 0o600)
        listener.listen(4)
    except OSError as error:
        listener.close()
        raise WorkerFailed(f"cannot listen on {path}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


async def _give_orders(process: asyncio.subprocess.Process, spec: WorkerSpec) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError, ConnectionResetError):  # it died: `_accept` says how
        process.stdin.write(msgspec.json.encode(spec))
        await process.stdin.drain()
    process.stdin.close()


async def _accept(listener: socket.socket, process: asyncio.subprocess.Process) -> ApiLink:
    """The worker's connection; strangers are turned away."""
    loop = asyncio.get_running_loop()
    while True:
        accepted = asyncio.ensure_future(loop.sock_accept(listener))
        gone = asyncio.ensure_future(process.wait())
        try:
            await asyncio.wait((accepted, gone), return_when=asyncio.FIRST_COMPLETED)
            if not accepted.done():
                raise WorkerFailed(f"a worker died before it was ready ({_status(process)})")
            connection, _ = accepted.result()
        finally:
            for task in (accepted, gone):
                task.cancel()
        pid = peer_pid(connection)
        if pid is None or pid == process.pid:
            reader, writer = await asyncio.open_unix_connection(sock=connection)
            return ApiLink(reader, writer)
        log.warning("a process other than worker %d (process %d) connected: dropped", process.pid, pid)
        connection.close()


async def _greeting(events: AsyncIterator[Event], process: asyncio.subprocess.Process) -> Hello:
    match await anext(events, None):
        case Hello() as hello if hello.protocol == PROTOCOL_VERSION:
            return hello
        case Hello(protocol=protocol):
            raise WorkerFailed(f"a worker speaks protocol {protocol}, this server {PROTOCOL_VERSION}")
        case StartFailed(error=error):
            raise WorkerFailed(error)
        case None:
            await process.wait()
            failed = WorkerFailed(f"a worker died before it was ready ({_status(process)})")
            failed.crashed = _crashed(process)
            raise failed
        case other:
            raise WorkerFailed(f"a worker began with {type(other).__name__} instead of Hello")


async def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
    await process.wait()


def _status(process: asyncio.subprocess.Process) -> str:
    code = process.returncode
    if code is None:
        return "still running"
    return f"signal {-code}" if code < 0 else f"exit status {code}"


def _crashed(process: asyncio.subprocess.Process) -> bool:
    return process.returncode is not None and -process.returncode in CRASHES


def check_same(hello: Hello, first: Hello) -> None:
    """A turn must not go on with other numbers than it began with: WorkerFailed where it would."""
    if hello.weights_digest != first.weights_digest:
        raise WorkerFailed("the model's files are not those that the server started with")
    if hello.namespace != first.namespace:
        raise WorkerFailed(f"it computes otherwise than the first worker ({hello.backend}, {first.backend})")
