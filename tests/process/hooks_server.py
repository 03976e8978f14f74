"""The application with a scripted model, on real disks and a real network, that can kill itself at a point.

`run`: its port, data directory, a file that says every prompt, the point (or `-`), and a file that says by
how many seconds this machine's clock is ahead. Its model calls what tools there are once each, until its
prompt has a result, and then says something about it.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvicorn

from agentserve.clock import WallClock
from agentserve.messages import Submit, unpack_tokens
from agentserve.server.agents.disk import Disk
from agentserve.server.agents.shelf import Shelf
from agentserve.server.http.app import create_app
from agentserve.server.http.context import ServerOptions
from agentserve.server.http.reply_parsers import ReplyParsers
from agentserve.server.sessions.changes import Change, Put
from agentserve.server.sessions.chronicle import Chronicle
from agentserve.server.sessions.directory import SessionDirectory
from agentserve.server.sessions.environment import Table
from agentserve.server.sessions.events import EventLogs
from agentserve.server.sessions.identity import new_session_id
from agentserve.server.sessions.journal import Journal
from agentserve.server.sessions.store import SessionStore
from agentserve.server.sessions.transcript import Transcript, Transcripts
from agentserve.server.webhooks.making import make_hooks
from tests.api_rig import hermes
from tests.fakes import END, EOS, ByteTemplate, ByteTokenizer, NoGrammars, Script, ScriptedEngine, chain, say
from tests.process.webhook_sender import ArmedSender, ArmedStore, Say, die
from tools_bridge.registry import ReplyForm
from tools_bridge.webhooks.address import AddressPolicy
from tools_bridge.webhooks.attempt import HttpSender, SendLimits
from tools_bridge.webhooks.dial import SystemResolver

WAIT = 100.0


class Armed(SessionStore):
    """Dies before or after it writes what has such a step in it."""

    armed = "-"

    def write(self, changes: Sequence[Change]) -> None:
        steps = {self.step(change.table, change.content) for change in changes if isinstance(change, Put)}
        for step in steps:
            if self.armed == f"{step}.before":
                die()
        super().write(changes)
        for step in steps:
            if self.armed == f"{step}.after":
                die()

    def step(self, table: Table, content: bytes) -> str:
        raise NotImplementedError


class ArmedSessions(Armed):
    def step(self, table: Table, content: bytes) -> str:
        if table is Table.TURNS:
            return "turn"
        held = table is Table.WORDS and content and msgspec.msgpack.decode(content, type=Transcript).held
        return "held" if held else ""


class ArmedAgents(Armed):
    def step(self, table: Table, content: bytes) -> str:
        said = json.loads(content) if content else {}
        kinds = {item["type"] for item in said.get("items", ())}
        if kinds & {"output", "call"}:
            return "item" if "output" in kinds else "said"
        return "over" if said.get("status") == "completed" else ""


def shelf_of(folder: Path) -> Shelf:
    disk = Disk(folder, time.time, 30.0, ArmedAgents)
    shelf = Shelf(book=disk)
    assert shelf.restore(disk.read()) == 0
    disk.content_of = shelf.encoded
    return shelf


async def main(say_line: Say, port: int, folder: Path, prompts: Path, armed: str) -> None:
    def reply(command: Submit) -> Script:
        prompt = bytes(t for t in unpack_tokens(command.tokens) if t < 256).decode()
        with prompts.open("a") as file:
            print(list(unpack_tokens(command.tokens)), file=file)
        if "tool\n" in prompt:
            return say("I see.")
        tools = dict.fromkeys(re.findall(r'"name": "([a-z_]+)"', prompt))
        return say("".join(hermes(name, '{"city": "Oslo"}') for name in tools))

    ArmedStore.armed = ArmedSessions.armed = ArmedAgents.armed = armed
    policy = AddressPolicy(allow_private=True)
    sender = HttpSender(policy, SystemResolver(), SendLimits(read_seconds=1.0, body_bytes=100_000))
    hooks = make_hooks(
        folder / "webhooks",
        allow_private=True,
        wall=time.time,
        callback_url=f"http://127.0.0.1:{port}",
        sender=ArmedSender(sender, armed),
        open_store=ArmedStore,
    )
    journal = Journal(ArmedSessions(folder / "sessions"), b"text", WallClock(), time.time, 30.0)
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
        agents=shelf_of(folder / "agents"),
        hooks=hooks,
        wall=time.time,
        now=hooks.now,
    )
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
        assert not serving.done()
    say_line(f"http://127.0.0.1:{port}")
    await serving


def run(say_line: Say, port: int, folder: Path, prompts: Path, armed: str, ahead: Path) -> None:
    real = time.time
    time.time = lambda: real() + float(ahead.read_text())
    asyncio.run(main(say_line, port, folder, prompts, armed))
