"""The real application with a scripted model, its sessions and agents on disk; run as a script.

Arguments: port (0: any), data directory. To a user who says `hang WORDS` the first server of a directory says
the first of them and then nothing more.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn

from agentserve.messages import Submit
from agentserve.server.http.context import ServerOptions
from agentserve.server.sessions.store import SessionStore
from agentserve.server.wiring import open_sessions, open_shelf
from tests.api_rig import Rig
from tests.client_rig import messages_of, obey
from tests.fakes import Script, ScriptedEngine, say


def script(data: Path) -> Callable[[Submit], Script]:
    later = (data / "sessions").exists()

    def reply(submit: Submit) -> Script:
        role, text = messages_of(submit)[-2]
        if role == "user" and text.startswith("hang "):
            return say(text.removeprefix("hang "), hold_at=None if later else 6)
        return obey(submit)

    return reply


async def main(port: int, data: Path) -> None:
    reply = script(data)
    text: Any = SimpleNamespace(digest=lambda: b"scripted")
    kept = open_sessions(SessionStore(data / "sessions"), text, ServerOptions(model="tiny"), 30.0)
    rig = Rig(
        ScriptedEngine(reply),
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
