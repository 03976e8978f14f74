"""The server that is fuzzed, as real processes, and what it holds."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.prove.crash.tiny_model import write_tiny_model

ROOT = Path(__file__).parent.parent.parent.parent
SCRIPT = Path(__file__).with_name("fuzz_server.py")
START, LIMIT = 120.0, 60.0
FLAGS: dict[str, Any] = {
    "port": 0, "threads": 1, "log_level": "warning", "served_model_name": "tiny",
    "device_kv": "24MiB", "host_kv": "8MiB", "disk_kv": "64MiB",
}  # fmt: skip


@dataclass
class Target:
    process: asyncio.subprocess.Process
    port: int
    log: Path
    http: httpx.AsyncClient
    stalls: list[dict[str, Any]] = field(default_factory=list)  # all that were told, with the part of the run
    ticks: int = 0

    @property
    def workers(self) -> list[int]:
        pid = self.process.pid
        return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    async def state(self, during: str = "") -> dict[str, Any]:
        """What it holds. Stalls that it tells of are kept, as of what went on `during` them."""
        reply = await self.http.get("/fuzz/state")
        assert reply.status_code == 200, reply.text
        told: dict[str, Any] = reply.json()
        self.stalls += [{"during": during, **stall} for stall in told.pop("stalls")]
        self.ticks = told["ticks"]
        return told

    async def metrics(self) -> dict[str, float]:
        lines = (await self.http.get("/metrics")).text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def check(self) -> None:
        """It lives, and nothing was said of a fault."""
        assert self.process.returncode is None, f"the server died: {self.log.read_text()[-3000:]}"
        text = self.log.read_text()
        for alarm in ("Traceback", "died", "keeper failed", "Task exception", "was never awaited"):
            assert alarm not in text, text[max(0, text.index(alarm) - 1500) :][:6000]

    def worker_rss(self) -> int:
        """Bytes of all its workers together; compile processes are not among them when nothing compiles."""
        pages = 0
        for pid in self.workers:
            if b"fuzz_worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@asynccontextmanager
async def target(folder: Path, config: Path | str = "", **flags: Any) -> AsyncIterator[Target]:
    """A server on a tiny model with KV in all tiers; in the end it is told to go, and goes well."""
    model = folder / "model"
    if not model.exists():
        write_tiny_model(model)
    log = folder / "log"
    given = FLAGS | {"model": str(model), "data_dir": str(folder / "data")} | flags
    with log.open("w") as file:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(SCRIPT), json.dumps(given), str(config),
            stdout=asyncio.subprocess.PIPE, stderr=file,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT),
                os.environ.get("PYTHONPATH"))))},
        )  # fmt: skip
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START):
            line = (await process.stdout.readline()).decode()
        assert line.startswith("ready on "), log.read_text()
        url = line.split()[-1]
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT) as http:
            yield Target(process, int(url.rpartition(":")[2]), log, http)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(LIMIT):
            assert await process.wait() == 0, log.read_text()[-3000:]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
