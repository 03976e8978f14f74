"""The real application with a scripted model, its sessions and responses on disk, and MCP servers; run as
a script.

Argument: the data directory. The model makes the call that a user's `call NAME ARGUMENTS` asks for, and says
"Done." to everything else.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn

from agentserve.messages import Submit
from agentserve.server.http.context import ServerOptions
from agentserve.server.http.responses.desk import Desk
from agentserve.server.sessions.store import SessionStore
from agentserve.server.wiring import open_records, open_sessions
from agentserve.text.conversation import unread
from tests.api_rig import Rig, hermes
from tests.client_rig import messages_of
from tests.fakes import Script, ScriptedEngine, say
from tools_bridge.mcp.remote import RemoteMcp
from tools_bridge.webhooks.address import AddressPolicy


def reply(submit: Submit) -> Script:
    role, text = messages_of(submit)[-2]
    if role == "user" and text.startswith("call "):
        _, name, arguments = text.split(" ", 2)
        return say(hermes(name, arguments))
    return say("Done.")


async def main(data: Path) -> None:
    text: Any = SimpleNamespace(digest=lambda: b"scripted")
    kept = open_sessions(SessionStore(data / "sessions"), text, ServerOptions(model="tiny"), 30.0)
    rig = Rig(
        ScriptedEngine(reply),
        directory=kept.directory,
        journal=kept.journal,
        chronicle=kept.chronicle,
        responses=Desk(time.time, records=open_records(data / "responses", 30.0)),
        mcp=RemoteMcp(AddressPolicy(hosts=("127.0.0.1",)), unread),
    )
    server = uvicorn.Server(uvicorn.Config(rig.app, host="127.0.0.1", port=0, log_level="warning"))
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
        assert not running.done()
    port = server.servers[0].sockets[0].getsockname()[1]
    print(f"AgentServe is ready on http://127.0.0.1:{port}", flush=True)
    await running


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
