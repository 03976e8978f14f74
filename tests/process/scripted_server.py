"""The real application with a scripted model, its sessions and agents on disk; run as a script.

Arguments: port (0: any), data directory.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn

from agentserve.server.sessions.store import SessionStore
from agentserve.server.wiring import open_sessions, open_shelf
from tests.api_rig import Rig
from tests.client_rig import obey
from tests.fakes import ScriptedEngine


async def main(port: int, data: Path) -> None:
    text: Any = SimpleNamespace(digest=lambda: b"scripted")
    kept = open_sessions(SessionStore(data / "sessions"), text, max_wait=3600.0, patience=30.0)
    rig = Rig(
        ScriptedEngine(obey),
        directory=kept.directory,
        journal=kept.journal,
        chronicle=kept.chronicle,
        agents=open_shelf(data / "agents", 30.0),
        wall=time.time,
    )
    server = uvicorn.Server(uvicorn.Config(rig.app, host="127.0.0.1", port=port, log_level="warning"))
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
        assert not running.done()
    port = server.servers[0].sockets[0].getsockname()[1]
    print(f"AgentServe is ready on http://127.0.0.1:{port}", flush=True)
    await running


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2])))
