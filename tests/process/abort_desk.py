"""The whole server with its API process in the test's own event loop: real worker process, real model,
real sockets and disks; tasks, turns and locks can be counted."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from agentserve.config import load
from agentserve.messages import TiersView, WorkerView
from agentserve.server.engine_port import News
from agentserve.server.http.context import ServerContext
from agentserve.server.sessions.changes import Change, Put
from agentserve.server.sessions.environment import Table
from agentserve.server.sessions.session_record import Session
from agentserve.server.sessions.store import SessionStore
from agentserve.server.wiring import prepare_app
from agentserve.server.workers.fleet import Fleet
from agentserve.server.workers.spec import worker_spec
from agentserve.server.workers.supervisor import WorkerProcess, private_directory
from tests.api_rig import CHAT, served

LIMIT = 240.0  # seconds until a wait is called a hang
FLAGS = {
    "device_kv": "14MiB",
    "host_kv": "8MiB",
    "disk_kv": "64MiB",
    "tier_policy": "lru",
    "max_num_seqs": "2",
    "max_batched_tokens": "64",
    "threads": "1",
    "log_level": "warning",
}


class GatedStore(SessionStore):
    """Sessions on a disk that takes no turn while `free` is not set."""

    def __init__(self, folder: Path, desk: Gate) -> None:
        super().__init__(folder)
        self._gate = desk

    def write(self, changes: Sequence[Change]) -> None:
        if any(isinstance(change, Put) and change.table is Table.TURNS for change in changes):
            if not self._gate.free.is_set():
                self._gate.reached.set()
            assert self._gate.free.wait(LIMIT)
        super().write(changes)


class Gate:
    def __init__(self) -> None:
        self.free, self.reached = threading.Event(), threading.Event()
        self.free.set()

    def hold(self) -> None:
        self.free.clear()
        self.reached.clear()


class Guest:
    """A client's connection with one request on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def reply(self) -> bytes:
        """All of the answer, until the server closes the connection."""
        return await asyncio.wait_for(self.reader.read(), LIMIT)

    async def until(self, text: bytes) -> None:
        await asyncio.wait_for(self.reader.readuntil(text), LIMIT)

    def leave(self) -> None:
        self._writer.close()


class Desk:
    def __init__(self, fleet: Fleet, app: Starlette, base: str, folder: Path, gate: Gate) -> None:
        self.fleet = fleet
        self.context: ServerContext = app.state.context
        self.gate = gate
        self.told: list[News] = []
        self._address = base.removeprefix("http://").split(":")
        self._armed = folder / "armed"
        self._tell = fleet.tell
        fleet.tell = self._spy  # type: ignore[method-assign]
        self._tasks = 0

    def _spy(self, news: News) -> None:
        self.told.append(news)
        self._tell(news)

    def arm(self, fault: str) -> None:
        self._armed.write_text(fault)

    # --- requests ----------------------------------------------------------------------------

    async def open(self, method: str, path: str, head: str = "", body: bytes = b"") -> Guest:
        reader, writer = await asyncio.open_connection(self._address[0], int(self._address[1]))
        guest = Guest(reader, writer)
        lines = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{head}\r\n"
        await guest.send(lines.encode() + body)
        return guest

    async def post(self, path: str, content: Any) -> Guest:
        body = json.dumps(content).encode()
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        return await self.open("POST", path, head, body)

    async def chat(self, name: str, text: str, **fields: Any) -> Guest:
        messages = [{"role": "user", "content": text}]
        body = {"model": "smollm2-135m", "messages": messages, "session_id": name, "temperature": 0, **fields}
        return await self.post(CHAT, body)

    async def whole(self, guest: Guest) -> Any:
        """The JSON of a reply that is a 200."""
        head, _, body = (await guest.reply()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), (head, body)
        guest.leave()
        return json.loads(body)

    async def delete(self, name: str) -> Guest:
        return await self.open("DELETE", f"/agentserve/sessions/{name}")

    # --- what there is -----------------------------------------------------------------------

    def session(self, name: str) -> Session | None:
        return self.context.directory.get("default", name)

    def state(self, name: str) -> str:
        session = self.session(name)
        return session.state.value if session is not None and session.running is not None else ""

    def tiers(self) -> TiersView:
        (report,) = self.fleet.tiers()
        return report.view

    async def worker(self) -> WorkerView:
        (view,) = (await self.fleet.describe()).workers
        return view

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT):
            while not done():  # noqa: ASYNC110  (nobody would set an event)
                await asyncio.sleep(0.001)

    def quiet(self) -> bool:
        """Nothing runs in this process that did not when it was idle."""
        running = any(session.running is not None for session in self.context.directory.sessions("default"))
        open_ = len(self.fleet._turns) + len(self.context.background)
        return not running and not open_ and len(asyncio.all_tasks()) <= self._tasks

    def count_tasks(self) -> None:
        """What there is now is what there is when nobody is served."""
        self._tasks = len(asyncio.all_tasks())

    async def rest(self) -> None:
        """Wait until nothing runs, is live, pinned or being moved, here or in the worker."""
        await self.until(self.quiet)
        async with asyncio.timeout(LIMIT):
            while True:
                view = await self.worker()
                assert view.tiers is not None
                busy = (view.running, view.waiting, view.pages_live, view.tiers.moving, view.tiers.pinned)
                if not any(busy):
                    break
        assert len(self.context.exclusive._locks) == 0
        assert not self.context.journal or self.context.journal.failure is None


@asynccontextmanager
async def desk(folder: Path) -> AsyncIterator[Desk]:
    """A server on `folder`, and its insides."""
    (folder / "armed").write_text("")
    config = load({"port": 0, "data_dir": str(folder / "data"), **FLAGS})
    gate = Gate()
    script = str(Path(__file__).with_name("faulty_worker.py"))
    prepared = prepare_app(config, open_store=partial(GatedStore, desk=gate))
    root = str(Path(__file__).parent.parent.parent)  # the checkout that is tested, installed or not
    with private_directory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))))

        async def start(index: int) -> WorkerProcess:
            spec = worker_spec(config, index, str(directory / "worker.sock"), os.getpid(), cores=1)
            return await WorkerProcess.start(spec, (sys.executable, script, str(folder / "armed")))

        async with Fleet(start, 1) as fleet:
            app = prepared.build(fleet)
            assert isinstance(app, Starlette)
            async with served(app) as base:
                made = Desk(fleet, app, base, folder, gate)
                try:
                    yield made
                finally:
                    gate.free.set()
                    made.arm("")
