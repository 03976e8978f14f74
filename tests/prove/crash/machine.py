"""A server on one data directory: started, killed, looked at while it is dead, started again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import lmdb

from tests.prove.crash.points import Point
from tests.prove.crash.world import LIMIT

ROOT = Path(__file__).parent.parent.parent.parent
# What a log must not say: nothing was damaged, so nothing may be given up.
ALARMS = (
    "Traceback",
    "started afresh",
    "set aside",
    "could not be read",
    "cannot all be read",
    "deleted",
    "not trusted",
    "cannot be kept",
    "may be lost",
    "keeper failed",
    "lost a token",
)


class Machine:
    def __init__(self, folder: Path, flags: dict[str, Any], *, durable: bool = True) -> None:
        self._folder = folder
        self.data = folder / "data"
        self._orders, self._hits, self._log = folder / "orders", folder / "hits", folder / "log"
        folder.mkdir(exist_ok=True)
        for file in (self._orders, self._hits, self._log):
            file.write_text("")
        data = {"data_dir": str(self.data)} if durable else {}
        self._flags = {"port": 0, "threads": 1, "log_level": "info", **data, **flags}
        self._process: asyncio.subprocess.Process | None = None
        self._given = 0
        self.starts = 0
        self.worker_deaths = 0  # in this life of the server

    # --- life -----------------------------------------------------------------------------

    async def start(self) -> str | None:
        """Its address; None if it died before it had one."""
        script = str(Path(__file__).with_name("crash_server.py"))
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with self._log.open("a") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, script, str(self._folder), json.dumps(self._flags),
                stdout=asyncio.subprocess.PIPE, stderr=log, env=os.environ | {"PYTHONPATH": paths},
            )  # fmt: skip
        assert self._process.stdout is not None
        self.starts += 1
        self.worker_deaths = 0
        async with asyncio.timeout(LIMIT):
            line = (await self._process.stdout.readline()).decode()
        return line.split()[-1] if line.startswith("ready on ") else None

    async def dead(self) -> int:
        """Waits until the server process has ended; its status."""
        assert self._process is not None
        async with asyncio.timeout(LIMIT):
            return await self._process.wait()

    @property
    def died(self) -> bool:
        assert self._process is not None
        return self._process.returncode is not None

    async def stop(self) -> None:
        """Let it drain and leave."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        assert await self.dead() == 0, self.log()

    async def destroy(self) -> None:
        """Leave nothing behind."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    @property
    def worker(self) -> int | None:
        """The worker's process, if there is one."""
        assert self._process is not None
        pid = self._process.pid
        with suppress(OSError):
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                with suppress(OSError):
                    if b"crash_worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                        return int(child)
        return None

    def kill(self, *, server: bool, worker: bool) -> None:
        """SIGKILL, now; of both the worker goes first."""
        if worker and (pid := self.worker) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.worker_deaths += 1
        if server and not self.died:
            assert self._process is not None
            self._process.kill()

    # --- orders ---------------------------------------------------------------------------

    def arm(self, point: Point, nth: int) -> int:
        """The number of the order."""
        self._given += 1
        self._orders.write_text(f"{self._given} {point.name} {nth}")
        return self._given

    def hit(self, order: int) -> bool:
        return any(line.split()[0] == str(order) for line in self._hits.read_text().splitlines())

    def hits(self) -> list[str]:
        """The points that were hit, in order."""
        return [line.split()[1] for line in self._hits.read_text().splitlines()]

    # --- while it is dead -----------------------------------------------------------------

    def inspect(self) -> int:
        """LMDB opens what the dead left, and every record can be read; how many there are."""
        environments = [self.data / "sessions", *(self.data / "kv").glob("worker-*")]
        found = 0
        for folder in environments:
            if not (folder / "data.mdb").exists():
                continue
            with lmdb.open(str(folder), readonly=True, lock=False, max_dbs=8) as env:
                with env.begin() as txn:
                    names = [name for name, _ in txn.cursor()]
                for name in names:
                    table = env.open_db(name, create=False)
                    with env.begin(db=table, buffers=True) as txn:
                        found += sum(bool(len(value)) for _, value in txn.cursor())
        assert not list((self.data / "sessions").glob("damaged-*"))
        return found

    def orphan(self) -> None:
        """What the worker left becomes that of a second one, which this server does not have."""
        mine, other = self.data / "kv" / "worker-0", self.data / "kv" / "worker-1"
        assert not other.exists() or not (other / "data.mdb").exists(), "an orphan was not adopted"
        if other.exists():
            for file in other.iterdir():
                file.unlink()
            other.rmdir()
        mine.rename(other)

    def log(self) -> str:
        return self._log.read_text()

    def alarms(self) -> list[str]:
        """Lines of the log that must not be there."""
        return [line for line in self.log().splitlines() if any(alarm in line for alarm in ALARMS)]
