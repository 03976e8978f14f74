"""A server of webhook tools that is killed and started again, and what its receivers and clients saw."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from tests.agents_rig import SESSIONS, body
from tests.hooks_rig import ACTION, ENDPOINTS
from tests.process import hooks_server
from tests.process.forks import Fork
from tests.process.test_proc_webhooks import Receiver

PATIENCE = 60.0


class Server:
    def __init__(self, folder: Path, receiver: Receiver, armed: str = "-") -> None:
        self.folder, self.receiver, self.port = folder, receiver, free_port()
        self.secrets: dict[str, str] = {}  # of endpoints
        self.readers: list[threading.Thread] = []
        self.told: dict[str, dict[str, Any]] = {}  # items that were told as done, or are results; by id
        self.set_clock(0.0)
        self.start(armed)

    def start(self, armed: str = "-") -> None:
        places = (self.folder / "data", self.folder / "prompts")
        self.fork = Fork(hooks_server.run, self.port, *places, armed, self.folder / "ahead")
        self.url = f"http://127.0.0.1:{self.port}"
        assert self.fork.line(PATIENCE) == self.url
        self.over = False
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE)

    def set_clock(self, ahead: float) -> None:
        """Of its machine, in seconds before ours."""
        fresh = self.folder / "ahead.new"
        fresh.write_text(str(ahead))
        fresh.replace(self.folder / "ahead")

    def died(self) -> None:
        """It killed itself."""
        assert self.fork.wait(PATIENCE) == -signal.SIGKILL
        self._over()

    def kill(self) -> None:
        if not self.over:
            self.fork.kill()
            self._over()

    def stop(self) -> None:
        """As its operator does: what is delivered goes on in the next server."""
        self.fork.signal(signal.SIGTERM)
        assert self.fork.wait(PATIENCE) == -signal.SIGTERM  # which uvicorn passes on, in the end
        self._over()

    def _over(self) -> None:
        if self.over:
            return
        self.over = True
        self.client.close()
        self.fork.close()
        for reader in self.readers:
            reader.join(PATIENCE)
        self.readers.clear()

    # --- what is asked of it -----------------------------------------------------------

    def endpoint(self, path: str, receiver: Receiver | None = None, port: int = 0, **fields: Any) -> str:
        """Whose secret the receiver knows. `port`: there is none yet."""
        receiver = receiver or self.receiver
        url = f"http://127.0.0.1:{port or receiver.port}/{path}"
        made = {"name": path, "url": url, "event_types": [ACTION], **fields}
        reply = self.client.post(ENDPOINTS, json=made)
        assert reply.status_code == 200, reply.text
        id_: str = reply.json()["id"]
        self.secrets[id_] = reply.json()["signing_secret"]
        if not port:
            receiver.knows(path, self.secrets[id_])
        return id_

    def rotate(self, endpoint: str, path: str) -> None:
        asked = {"keep_old_secret_active_for_24_hours": True}
        reply = self.client.post(f"{ENDPOINTS}/{endpoint}/rotate_secret", json=asked)
        assert reply.status_code == 200, reply.text
        self.receiver.knows(path, reply.json()["signing_secret"])

    def session(self, *tools: dict[str, Any]) -> str:
        """Without a turn, so that its id is known whatever happens then."""
        reply = self.client.post(SESSIONS, json=body({"tools": list(tools)}))
        assert reply.status_code == 200, reply.text
        id_: str = reply.json()["id"]
        return id_

    def ask(self, session: str) -> None:
        content = [{"role": "user", "content": "Weather?"}]
        self.send(session, {"type": "agent.session.input.message", "input": content})

    def send(self, session: str, *events: dict[str, Any]) -> None:
        try:
            reply = self.client.post(f"{SESSIONS}/{session}/events", json={"events": list(events)})
            assert reply.status_code == 202, reply.text
        except httpx.TransportError:
            pass  # it killed itself meanwhile

    def follow(self, session: str) -> None:
        """Note what is told of its items, to the end of this server."""
        path, base = f"{SESSIONS}/{session}/events", self.client.base_url

        def read() -> None:
            with (
                suppress(httpx.TransportError),
                httpx.Client(base_url=base, timeout=PATIENCE) as client,
                client.stream("GET", path, headers={"accept": "text/event-stream"}) as stream,
            ):
                began.set()
                for line in stream.iter_lines():
                    if line.startswith("data: {"):
                        self._note(json.loads(line.removeprefix("data: ")))
            began.set()

        began = threading.Event()
        self.readers.append(threading.Thread(target=read, daemon=True))
        self.readers[-1].start()
        assert began.wait(PATIENCE)

    def _note(self, event: dict[str, Any]) -> None:
        item = event.get("item")
        if item and (event["type"].endswith(".done") or item["type"] == "function_call_output"):
            self.told[item["id"]] = item

    # --- what it says ------------------------------------------------------------------

    def status(self, session: str) -> str:
        status: str = self.client.get(f"{SESSIONS}/{session}").json()["status"]
        return status

    def waits(self, session: str) -> None:
        self.until(lambda: self.status(session) == "requires_action")

    def items(self, session: str) -> list[Any]:
        self.until(lambda: self.status(session) == "idle")
        data: list[Any] = self.client.get(f"{SESSIONS}/{session}/items?order=asc").json()["data"]
        return data

    def outputs(self, session: str) -> list[Any]:
        """What the model read of each call, in call order."""
        items = self.items(session)
        found = {item["call_id"]: item for item in items if item["type"] == "function_call_output"}
        calls = [item["call_id"] for item in items if item["type"] == "function_call"]
        assert sorted(found) == sorted(calls)
        assert [item["type"] for item in items].count("message") == 2
        outputs = [found[call] for call in calls]
        return [one["error"] if one["output"] is None else one["output"] for one in outputs]

    def deliveries(self, endpoint: str) -> list[Any]:
        data: list[Any] = self.client.get(f"{ENDPOINTS}/{endpoint}/deliveries").json()["data"]
        return data

    def nothing_owed(self) -> None:
        self.until(lambda: self.client.get("/health").json()["webhooks"]["owed"] == 0)

    def prompts(self) -> list[str]:
        return (self.folder / "prompts").read_text().splitlines()

    def check_told(self, items: list[Any]) -> None:
        """What was told of items, before whichever kill, is so."""
        there = {item["id"]: item for item in items}
        for id_, item in self.told.items():
            assert id_ in there, item
            if item["type"] == "function_call_output":
                assert there[id_] == item

    @staticmethod
    def until(done: Any) -> None:
        ends = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < ends
            time.sleep(0.01)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port
