"""The application with a scripted model, on real disks and a real network, that can kill itself at a point.

Arguments: data directory, a file that says every prompt, the point (or `-`). Its model calls `weather` until
its prompt has a result, and then says something about it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import uvicorn

from agentserve.clock import WallClock
from agentserve.messages import Submit, unpack_tokens
from agentserve.server.http.app import create_app
from agentserve.server.http.context import ServerOptions
from agentserve.server.http.reply_parsers import ReplyParsers
from agentserve.server.sessions.chronicle import Chronicle
from agentserve.server.sessions.directory import SessionDirectory
from agentserve.server.sessions.events import EventLogs
from agentserve.server.sessions.identity import new_session_id
from agentserve.server.sessions.journal import Journal
from agentserve.server.sessions.store import SessionStore
from agentserve.server.sessions.transcript import Transcripts
from agentserve.server.webhooks.making import make_hooks
from agentserve.server.wiring import open_shelf
from tests.api_rig import hermes
from tests.fakes import END, EOS, ByteTemplate, ByteTokenizer, NoGrammars, Script, ScriptedEngine, chain, say
from tests.process.webhook_sender import ArmedSender, ArmedStore
from tools_bridge.registry import ReplyForm
from tools_bridge.webhooks.address import AddressPolicy
from tools_bridge.webhooks.attempt import HttpSender, SendLimits
from tools_bridge.webhooks.dial import SystemResolver

WAIT = 100.0


async def main(folder: Path, prompts: Path, armed: str) -> None:
    def reply(command: Submit) -> Script:
        prompt = bytes(t for t in unpack_tokens(command.tokens) if t < 256).decode()
        with prompts.open("a") as file:
            print(list(unpack_tokens(command.tokens)), file=file)
        if "tool\n" in prompt:
            return say("I see.")
        return say(hermes("weather", '{"city": "Oslo"}'))

    ArmedStore.armed = armed
    policy = AddressPolicy(allow_private=True)
    sender = HttpSender(policy, SystemResolver(), SendLimits(read_seconds=1.0, body_bytes=100_000))
    hooks = make_hooks(
        folder / "webhooks", allow_private=True, sender=ArmedSender(sender, armed), open_store=ArmedStore
    )
    journal = Journal(SessionStore(folder / "sessions"), b"text", WallClock(), time.time, 30.0)
    directory = SessionDirectory(new_session_id, max_wait=WAIT, book=journal)
    directory.restore(journal.sessions(), time.monotonic())
    transcripts = Transcripts()
    for transcript in journal.transcripts:
        transcripts.restore(transcript)
    journal.words_of = transcripts.export
    app = create_app(
        ScriptedEngine(reply),
        ServerOptions(model="tiny", tool_wait_seconds=WAIT),
        tokenizer=ByteTokenizer(),
        template=ByteTemplate(),
        end_ids=(END, EOS),
        chain=chain,
        tool_parser=ReplyParsers(ReplyForm()),
        grammar_maker=NoGrammars(),
        directory=directory,
        journal=journal,
        chronicle=Chronicle(transcripts, EventLogs(lambda: "epoch")),
        agents=open_shelf(folder / "agents", 30.0),
        hooks=hooks,
    )
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
        assert not serving.done()
    print(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", flush=True)
    await serving


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
