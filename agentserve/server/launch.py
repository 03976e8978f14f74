"""Start, serve, drain: the API process from its first socket to its last worker.

The port is bound first (so that a taken one is known at once) but listened to last: no client
gets in before every worker is ready. SIGTERM or SIGINT drains; a second one leaves at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import uvicorn
import uvloop
from starlette.types import ASGIApp

from agentserve.config import HttpConfig, ServeConfig
from agentserve.heap import (
    FullCollections,
    PythonsCollector,
    bound_pieces,
    freeze,
    give_back,
    resident,
)
from agentserve.machine import available_memory, usable_cores
from agentserve.messages import Hello
from agentserve.records.series import FolderTaken, claimed
from agentserve.server.agents.remote import MOST_CALLS, MOST_LISTINGS
from agentserve.server.engine_port import Engine
from agentserve.server.http.app import begin_drain
from agentserve.server.http.connections import WireBounds
from agentserve.server.http.wire_bounds import bounded_protocol
from agentserve.server.tidying import Memory, Tidying
from agentserve.server.workers.fleet import Fleet
from agentserve.server.workers.spec import replacement, scheduling_of, worker_spec
from agentserve.server.workers.supervisor import (
    WORKER_COMMAND,
    WorkerFailed,
    WorkerProcess,
    private_directory,
)
from agentserve.values import show_size
from tiering.stores.environment import distrust, worker_folder
from tiering.stores.private import close_to_others

log = logging.getLogger(__name__)

AppBuilder = Callable[[Engine], ASGIApp]

OTHER_FILES = 256 + 2 * (MOST_CALLS + MOST_LISTINGS)  # open besides connections: to MCP servers, too
STOP_GRACE = 5.0  # seconds a worker has to leave by itself
SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class Prepared:
    """The API side, ready but for the engine: the name clients use for the model, and the last step."""

    model: str
    build: AppBuilder


AppFactory = Callable[[ServeConfig], Prepared]
"""May take its time (tokenizer, template): it runs in a thread while the workers start. A
ValueError or OSError stops the start."""


class LaunchError(Exception):
    """The server cannot start, or cannot go on; one line for the operator."""


@dataclass(frozen=True, slots=True)
class Ready:
    """What there is to say once the port is open."""

    url: str
    model: str
    workers: int
    hello: Hello


def run(
    config: ServeConfig,
    factory: AppFactory,
    on_ready: Callable[[Ready], None],
    worker_command: Sequence[str] = WORKER_COMMAND,
) -> None:
    """Serve until a signal says otherwise.

    Raises LaunchError if it cannot start, and when no worker is left and none will come back: whoever
    runs the service starts it anew, rather than have it answer 503 for good.
    """
    check_memory(config, available_memory())
    try:
        scheduling_of(config)
    except ValueError as error:
        raise LaunchError(f"--scheduling: {error}") from None
    try:
        with claimed(config.recording.dir):
            _run(config, factory, on_ready, worker_command)
    except FolderTaken as error:
        raise LaunchError(str(error)) from None


def _run(
    config: ServeConfig,
    factory: AppFactory,
    on_ready: Callable[[Ready], None],
    worker_command: Sequence[str],
) -> None:
    bound_pieces()
    if (data_dir := config.storage.data_dir) is not None:
        for name in ("kv", "sessions", "tenants", "audit"):  # all else that may lie there is not ours
            close_to_others(data_dir / name)
    with (
        contextlib.closing(bind(config.http.host, config.http.port)) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_Launch(config, factory, on_ready, worker_command).main(listener))


def check_memory(config: ServeConfig, available: int | None) -> None:
    """LaunchError where all workers' host tiers together are more than the machine has left."""
    each, count = config.storage.host_kv, config.workers.count
    if available is not None and each * count > available:
        raise LaunchError(
            f"--host-kv {show_size(each)}: {count} worker(s) would take {show_size(each * count)} "
            f"of the {show_size(available)} that are free"
        )


def wire_bounds(http: HttpConfig) -> WireBounds:
    """What a connection may do; not more connections than the process may have files for."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = http.max_connections
    if files != resource.RLIM_INFINITY:
        most = max(1, min(most, files - OTHER_FILES))
    each = http.max_connections_per_address
    return WireBounds(
        head_bytes=http.max_header,
        headers=http.max_headers,
        url_bytes=http.max_url,
        head_seconds=http.header_seconds,
        unread_seconds=http.unread_seconds,
        connections=most,
        per_address=max(1, most // 2) if each is None else each,
    )


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises LaunchError, e.g. if the port is taken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise LaunchError(f"cannot listen on {host}: {error.strerror}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise LaunchError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    sock.setblocking(False)
    return sock


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers (when to drain is decided here), and a word when it listens."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_listening()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Launch:
    def __init__(
        self,
        config: ServeConfig,
        factory: AppFactory,
        on_ready: Callable[[Ready], None],
        worker_command: Sequence[str],
    ) -> None:
        self._config = config
        self._factory = factory
        self._on_ready = on_ready
        self._command = worker_command
        self._server: _Server | None = None
        self._app: ASGIApp | None = None
        self._interruptible: tuple[asyncio.Task[Any], ...] = ()
        self._signals = 0

    async def main(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        cores = usable_cores()
        last: dict[int, WorkerProcess] = {}
        crashed: set[int] = set()  # a peer's damaged page may have been why: they read their own only

        async def start_once(index: int) -> WorkerProcess:
            # The directory is there for the moment of connecting only: kill -9 leaves no litter.
            with private_directory() as directory:
                spec = worker_spec(self._config, index, str(directory / "worker.sock"), os.getpid(), cores)
                spec = msgspec.structs.replace(spec, peers=index not in crashed)
                if index in last:
                    spec = replacement(spec, last[index].hello.kv_bytes)
                return await WorkerProcess.start(spec, self._command)

        async def start_worker(index: int) -> WorkerProcess:
            if index in last and last[index].crashed:
                crashed.add(index)
                self._distrust_disk(index)
            try:
                last[index] = await start_once(index)
            except WorkerFailed as error:
                if not (error.crashed and self._distrust_disk(index)):
                    raise
                last[index] = await start_once(index)
            return last[index]

        workers = self._config.workers
        fleet = Fleet(start_worker, workers.count, hang_seconds=workers.hang_seconds)
        try:
            prepared = await self._start(fleet)
            if prepared is not None:
                await self._serve(prepared, fleet, listener)
        finally:
            await self._stop(fleet)

    def _distrust_disk(self, index: int) -> bool:
        """A worker crashed, and one damaged page of its KV on disk can do that, in LMDB: it is a cache, and
        is not opened again. False if there is none."""
        storage = self._config.storage
        if not storage.disk_kv or storage.data_dir is None:
            return False
        folder = worker_folder(storage.data_dir, index)
        log.warning("worker %d crashed: its KV in %s is not trusted any more", index, folder)
        return distrust(folder)

    async def _start(self, fleet: Fleet) -> Prepared | None:
        """Workers and the API side's own preparations, at the same time; None if a signal came first."""
        workers = asyncio.create_task(fleet.start())
        preparing = asyncio.create_task(asyncio.to_thread(self._factory, self._config))
        self._interruptible = (workers, preparing)
        try:
            _, prepared = await asyncio.gather(workers, preparing)
            return prepared if not self._signals else None
        except asyncio.CancelledError:
            if self._signals:
                return None
            raise
        except (WorkerFailed, ValueError, OSError) as error:
            raise LaunchError(" ".join(str(error).split())) from error
        finally:
            self._interruptible = ()
            workers.cancel()
            preparing.cancel()
            await asyncio.gather(workers, preparing, return_exceptions=True)

    async def _stop(self, fleet: Fleet) -> None:
        stopping = asyncio.create_task(fleet.stop(STOP_GRACE if self._signals < 2 else 0.0))
        self._interruptible = (stopping,)
        await asyncio.wait((stopping,))
        if not stopping.cancelled():
            stopping.result()

    async def _serve(self, prepared: Prepared, fleet: Fleet, listener: socket.socket) -> None:
        self._app = prepared.build(fleet)
        settings = uvicorn.Config(
            self._app,
            http=bounded_protocol(wire_bounds(self._config.http)),
            ws="none",
            loop="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=math.ceil(self._config.http.drain_seconds),
        )
        ready = self._ready(prepared, fleet, listener)
        self._server = _Server(settings, lambda: self._on_ready(ready))
        lost = asyncio.create_task(self._leave_when_lost(fleet, self._server))
        tidying = Tidying(FullCollections(PythonsCollector()), Memory(resident, give_back), time.process_time)
        freeze()
        tidying.start()
        try:
            await self._server.serve(sockets=[listener])
        except SystemExit:
            raise LaunchError("the API could not start; the log above says why") from None
        finally:
            await tidying.stop()
            lost.cancel()
            await asyncio.wait((lost,))
        if not lost.cancelled() and not self._signals:
            raise LaunchError("no worker is left: each died too often soon after its start; the log says why")

    @staticmethod
    async def _leave_when_lost(fleet: Fleet, server: _Server) -> None:
        await fleet.lost()
        server.should_exit = True  # the turns have ended; what was said of them may still be sent

    def _ready(self, prepared: Prepared, fleet: Fleet, listener: socket.socket) -> Ready:
        host, port = self._config.http.host.strip("[]"), listener.getsockname()[1]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        return Ready(url, prepared.model, fleet.alive, fleet.hello)

    def _on_signal(self) -> None:
        self._signals += 1
        if self._signals == 1:
            log.info(
                "draining: running turns have %g s; again to leave at once", self._config.http.drain_seconds
            )
        if self._server is not None:
            self._server.should_exit = True
            self._server.force_exit = self._signals > 1
        if self._app is not None:
            begin_drain(self._app)
        if self._server is None or self._signals > 1:
            for task in self._interruptible:
                task.cancel()
