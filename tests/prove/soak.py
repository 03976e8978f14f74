"""Clients that behave as badly as real ones, against a server whose workers are killed under them.

Each act is a small conversation drawn from its own seed. Acts run side by side while workers die;
afterwards those that were completed run again, one at a time and undisturbed, and must have said the
very same tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parent.parent.parent
LIMIT = 300.0  # seconds until a wait is called a hang
CHAT = "/v1/chat/completions"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
KINDS = ("stream", "tools", "siblings", "choices", "disconnect", "delete", "abandon")


@dataclass(frozen=True)
class Said:
    """One completed reply: its prompt, its tokens, how it ended."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Act:
    """What one client does. `seed` decides everything about it."""

    kind: str
    seed: int


@dataclass
class Sessions:
    """What must be known of sessions at the end: their state; None where both are right."""

    expected: dict[str, str | None] = field(default_factory=dict)

    def rests(self, name: str) -> None:
        self.expected[name] = "IDLE"

    def waits(self, name: str) -> None:
        self.expected[name] = "WAITING_TOOL"

    def gone(self, name: str) -> None:
        self.expected[name] = "gone"

    def unknown(self, name: str) -> None:
        self.expected[name] = None

    def check(self, listed: Sequence[dict[str, Any]]) -> None:
        found = {session["id"]: session for session in listed}
        assert all(session["running_turn"] is None for session in listed), "a session still runs"
        strangers = found.keys() - self.expected.keys()
        assert not strangers, f"sessions that nobody opened: {strangers}"
        for name, state in self.expected.items():
            if state is not None:
                seen = found[name]["state"] if name in found else "gone"
                assert seen == state, f"session {name} is {seen}, not {state}"


@dataclass(frozen=True)
class Settings:
    """How large a soak is, and what is asked of the model."""

    acts: int
    clients: int
    kills: int
    max_tokens: int  # of a reply that may be a call
    text_tokens: int  # of any other
    pause: float  # mean seconds between two kills
    tool_choice: Any = "auto"


class Client:
    """Plays acts; `sessions` is told what became of theirs."""

    def __init__(self, http: httpx.AsyncClient, settings: Settings, sessions: Sessions) -> None:
        self._http = http
        self._settings = settings
        self._sessions = sessions

    async def play(self, act: Act) -> list[Said]:
        """What was said in an act, in an order of its own; empty where nothing is completed."""
        rng = random.Random(act.seed)
        played: list[Said] = await getattr(self, f"_{act.kind}")(rng)
        return played

    # --- acts ---------------------------------------------------------------------------

    async def _stream(self, rng: random.Random) -> list[Said]:
        name, said, _ = await self._read(self._body([user(rng)]))
        self._sessions.rests(name)
        return [said]

    async def _tools(self, rng: random.Random) -> list[Said]:
        messages, said = [user(rng)], []
        for _ in range(rng.randint(1, 2)):
            name, reply, message = await self._whole(self._body(messages, tools=True))
            said.append(reply)
            messages += [message, result(message, rng)]
            name, reply, message = await self._whole(self._body(messages, tools=True, choose=False))
            said.append(reply)
            messages += [message, user(rng)]
            if message.get("tool_calls"):  # a real model may call again
                self._sessions.waits(name)
                return said
            self._sessions.rests(name)
        return said

    async def _siblings(self, rng: random.Random) -> list[Said]:
        messages = [user(rng)]
        first, call, message = await self._whole(self._body(messages, tools=True))
        answers = [[*messages, message, result(message, rng)] for _ in range(3)]
        bodies = [self._body(answer, tools=True, choose=False) for answer in answers]
        replies = await asyncio.gather(*(self._whole(body) for body in bodies))
        self._sessions.unknown(first)  # which of them went on in the first session is not ours to say
        for name, _, message in replies:
            waits = bool(message.get("tool_calls"))
            (self._sessions.waits if waits else self._sessions.rests)(name)
        return [call, *(said for _, said, _ in replies)]

    async def _choices(self, rng: random.Random) -> list[Said]:
        reply = await self._post(self._body([user(rng)]) | {"n": 3})
        self._sessions.rests(reply["session_id"])
        for choice in reply["choices"][1:]:
            self._sessions.rests(choice["session_id"])
        return [said_of(reply, index) for index in range(3)]

    async def _disconnect(self, rng: random.Random) -> list[Said]:
        """Leave after some events, or before the first."""
        leave, count = rng.randint(0, 8), 0
        with suppress(TimeoutError):
            async with asyncio.timeout(rng.uniform(0.01, 1.0) if leave == 0 else LIMIT):
                body = self._body([user(rng)], tools=rng.random() < 0.5) | {"stream": True}
                async with self._http.stream("POST", CHAT, json=body) as reply:
                    self._sessions.unknown(reply.headers["x-session-id"])
                    async for _ in reply.aiter_lines():
                        count += 1
                        if leave and count >= leave:
                            break
        return []

    async def _delete(self, rng: random.Random) -> list[Said]:
        """Close a session whose turn runs."""
        after, count, name = rng.randint(0, 8), 0, ""
        body = self._body([user(rng)]) | {"stream": True}
        async with self._http.stream("POST", CHAT, json=body) as reply:
            assert reply.status_code == 200
            name = reply.headers["x-session-id"]
            async for _ in reply.aiter_lines():
                count += 1
                if count == after + 1:
                    gone = await self._http.delete(f"/agentserve/sessions/{name}")
                    assert gone.status_code == 200, gone.text
        self._sessions.gone(name)
        return []

    async def _abandon(self, rng: random.Random) -> list[Said]:
        """A call that is never answered."""
        name, said, message = await self._whole(self._body([user(rng)], tools=True))
        (self._sessions.waits if message.get("tool_calls") else self._sessions.rests)(name)
        return [said]

    # --- requests -----------------------------------------------------------------------

    def _body(
        self, messages: list[dict[str, Any]], tools: bool = False, choose: bool = True
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": "smollm2-135m",
            "messages": messages,
            "temperature": 0,
            "max_tokens": self._settings.max_tokens if tools and choose else self._settings.text_tokens,
            "return_token_ids": True,
        }
        if tools:
            body |= {"tools": TOOLS, "tool_choice": self._settings.tool_choice if choose else "none"}
        return body

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        reply = await self._http.post(CHAT, json=body)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    async def _whole(self, body: dict[str, Any]) -> tuple[str, Said, dict[str, Any]]:
        reply = await self._post(body)
        message = {"role": "assistant", **reply["choices"][0]["message"]}
        return reply["session_id"], said_of(reply, 0), message

    async def _read(self, body: dict[str, Any]) -> tuple[str, Said, None]:
        prompt: list[int] = []
        ids: list[int] = []
        reason, name, done = "", "", False
        async with self._http.stream("POST", CHAT, json=body | {"stream": True}) as reply:
            assert reply.status_code == 200
            async for line in reply.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    name = event["session_id"]
                    prompt += event.get("prompt_token_ids") or []
                    for choice in event["choices"]:
                        ids += choice.get("token_ids") or []
                        reason = choice["finish_reason"] or reason
        assert done, "a stream broke off"
        return name, Said(tuple(prompt), tuple(ids), reason), None


def user(rng: random.Random) -> dict[str, Any]:
    """No two users say the same: their sessions are their own."""
    text = f"{rng.getrandbits(64):016x} " + "please " * rng.randint(0, 30)
    return {"role": "user", "content": text}


def result(message: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    [call] = message["tool_calls"]
    return {"role": "tool", "tool_call_id": call["id"], "content": f"Rain, {rng.randint(-20, 40)} degrees."}


def said_of(reply: dict[str, Any], index: int) -> Said:
    choice = reply["choices"][index]
    return Said(tuple(reply["prompt_token_ids"]), tuple(choice["token_ids"]), choice["finish_reason"])


class Server:
    """A server process, and every process it ever had."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url
        self.seen: set[int] = set()

    def children(self) -> list[int]:
        pid = self.process.pid
        found = [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        self.seen.update(found)
        return found

    def stop(self) -> None:
        """Drain; nothing may be left."""
        self.children()
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=LIMIT)
        assert self.process.returncode == 0
        left = [pid for pid in self.seen if not _gone(pid)]
        assert not left, f"processes are left: {left}"


@contextmanager
def serving(command: Sequence[str]) -> Iterator[Server]:
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": paths}
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "ready on" in line, line
        yield Server(process, line.split()[-1])
    finally:
        process.kill()
        process.communicate()


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


class Soak:
    """One soak of one server."""

    def __init__(self, server: Server, settings: Settings, seed: int) -> None:
        self._server = server
        self._settings = settings
        self._rng = random.Random(seed)
        self._acts = [self._act(number) for number in range(settings.acts)]
        self._sessions = Sessions()
        self._said: dict[Act, list[Said]] = {}
        self._kills = 0
        self._started: dict[Act, int] = {}  # acts under way -> how many kills there had been
        self._quiet = asyncio.Event()

    def _act(self, number: int) -> Act:
        kind = KINDS[number % len(KINDS)] if number < len(KINDS) else self._rng.choice(KINDS)
        return Act(kind, self._rng.getrandbits(48))

    async def run(self, oracle: Callable[[Said], bool] | None = None) -> str:
        """Everything, then the proofs; a line that says what was done."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._server.url, timeout=LIMIT, limits=limits) as http:
            client = Client(http, self._settings, self._sessions)
            disturbed = time.monotonic()
            killer = asyncio.create_task(self._kill())
            queue = list(self._acts)
            await asyncio.gather(*(self._work(client, queue) for _ in range(self._settings.clients)))
            self._quiet.set()
            await killer
            await self._settle(http)
            disturbed = time.monotonic() - disturbed
            listed = (await http.get("/agentserve/sessions?limit=1000")).json()
            assert not listed["has_more"]
            self._sessions.check(listed["data"])
            replies = sum(map(len, self._said.values()))
            if oracle is not None:
                wrong = [said for all_said in self._said.values() for said in all_said if not oracle(said)]
                assert not wrong, f"said something else than undisturbed: {wrong[0]}"
            else:
                await self._again(client, http)
        kinds = Counter(act.kind for act in self._acts)
        told = ", ".join(f"{kinds[kind]} {kind}" for kind in KINDS)
        return f"{told}; {replies} replies compared, {self._kills} kills, {disturbed:.0f} s"

    async def _work(self, client: Client, queue: list[Act]) -> None:
        while queue:
            act = queue.pop()
            self._started[act] = self._kills
            self._said[act] = await client.play(act)
            del self._started[act]

    async def _kill(self) -> None:
        """Kill a worker now and then, but no turn thrice: such a turn is given up, rightly."""
        while self._kills < self._settings.kills:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._rng.uniform(0.2, 2.0) * self._settings.pause):
                    await self._quiet.wait()
            if self._quiet.is_set():
                return
            workers = self._server.children()
            if workers and all(self._kills - before < 2 for before in self._started.values()):
                self._kills += 1
                with suppress(ProcessLookupError):
                    os.kill(self._rng.choice(workers), signal.SIGKILL)

    async def _settle(self, http: httpx.AsyncClient) -> None:
        """Wait until nothing runs: no turn, no live page."""
        names = ("turns_active", "engine_running", "engine_waiting", "kv_pages_live")
        async with asyncio.timeout(LIMIT):
            while True:
                lines = (await http.get("/metrics")).text.splitlines()
                values = dict(line.rsplit(" ", 1) for line in lines if line.startswith("agentserve_"))
                busy = {name: values[f"agentserve_{name}"] for name in names}
                if float(values["agentserve_workers"]) and not any(map(float, busy.values())):
                    return
                await asyncio.sleep(0.1)

    async def _again(self, client: Client, http: httpx.AsyncClient) -> None:
        """Every completed act once more, alone and from an empty cache."""
        assert (await http.post("/reset_prefix_cache")).json() == {"success": True}
        for act, said in self._said.items():
            if said:
                assert await client.play(act) == said, f"{act} said something else than undisturbed"


def soak(command: Sequence[str], settings: Settings, seed: int, oracle: Callable[[Said], bool] | None) -> str:
    """Start, soak, stop; what was done."""
    with serving(command) as server:
        told = asyncio.run(Soak(server, settings, seed).run(oracle))
        server.stop()
    return told
