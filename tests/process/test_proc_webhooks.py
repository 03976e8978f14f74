"""Webhooks on a real network: receivers that misbehave in every way, and a sender that is killed."""

from __future__ import annotations

import asyncio
import itertools
import queue
import random
import shutil
import socket
import ssl
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.process import webhook_receiver, webhook_sender
from tests.process.forks import Fork
from tests.process.webhook_sender import POINTS
from tools_bridge.webhooks.address import AddressPolicy
from tools_bridge.webhooks.attempt import HttpSender, Post, SendLimits
from tools_bridge.webhooks.clock import LoopTime
from tools_bridge.webhooks.courier import Courier
from tools_bridge.webhooks.dial import SystemResolver
from tools_bridge.webhooks.outbox import Outbox
from tools_bridge.webhooks.replies import Answered, Failed, Fault
from tools_bridge.webhooks.signing import key_of, make_secret
from tools_bridge.webhooks.types import Delivered, Disabled, Endpoint, GaveUp, Outcome, ToolResult, Why

pytestmark = pytest.mark.process

PATIENCE = 60.0
SECRET = make_secret(bytes(range(32)))


class Receiver:
    """The process, and what it got."""

    def __init__(self, port: int = 0) -> None:
        self.fork = Fork(webhook_receiver.run, SECRET, port)
        self.port = int(self.fork.line())
        self.lines: queue.Queue[str] = queue.Queue()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        for line in self.fork.lines():
            self.lines.put(line)

    def got(self) -> list[list[str]]:
        """Path, id, body and what it thinks of the signature, of every request since the last call."""
        httpx.get(f"http://127.0.0.1:{self.port}/mark", timeout=PATIENCE).raise_for_status()
        found = []
        while (line := self.lines.get(timeout=PATIENCE)) != "mark":
            found.append(line.split(maxsplit=3))
        return found

    def effects(self) -> Counter[str]:
        """How often it did what an event asks for."""
        return Counter(httpx.get(f"http://127.0.0.1:{self.port}/effects", timeout=PATIENCE).json())

    def knows(self, path: str, secret: str) -> None:
        """What is signed with is this from now on, for a path."""
        httpx.post(f"http://127.0.0.1:{self.port}/secret/{path}", content=secret).raise_for_status()

    def close(self) -> None:
        self.fork.kill()
        self._thread.join()
        self.fork.close()


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


class Desk:
    def __init__(self, port: int, folder: Path | None = None) -> None:
        self.clock, self.port = LoopTime(), port
        policy = AddressPolicy(allow_private=True)
        numbers = itertools.count()
        self.box = Outbox(
            folder,
            policy,
            self.clock.now,
            random_bytes=lambda size: key_of(SECRET) if size == 32 else b"%012d" % next(numbers),
        )
        limits = SendLimits(connect_seconds=5.0, read_seconds=1.0, body_bytes=100_000)
        self.courier = Courier(self.box, HttpSender(policy, SystemResolver(), limits), self.clock)

    async def call(self, path: str, seconds: float = 20.0, host: str = "localhost") -> Endpoint:
        url = f"http://{host}:{self.port}/{path}"
        endpoint, _ = await self.box.create_endpoint("ann", path, url, ["t"])
        await self.courier.call(endpoint.id, f"msg_{path}", "t", b'{"x":1}', self.clock.now() + seconds)
        return endpoint

    async def close(self) -> None:
        await self.courier.close()
        await self.box.close()


async def test_whatever_receivers_do_every_call_ends_and_none_waits_for_another(receiver: Receiver) -> None:
    receiver.got()
    desk = Desk(receiver.port)
    desk.courier.start()
    names = ["hangs", "silent", "huge", "slow", "flaky", "cut", "dropped", "redirect", "gone", "garbage"]
    names += ["busy", "later", "good"]
    ends: dict[str, object] = {}
    short = {"hangs": 2.0, "silent": 2.0, "redirect": 2.0}
    endpoints = {(await desk.call(name, short.get(name, 20.0))).id: name for name in names}
    disabled = []
    while len(ends) < len(names):
        told = await asyncio.wait_for(desk.courier.outcomes.get(), PATIENCE)
        if isinstance(told, Disabled):
            disabled.append(endpoints[told.endpoint])
        else:
            assert endpoints[told.key.endpoint] not in ends
            ends[endpoints[told.key.endpoint]] = told.ending
    await desk.close()
    assert disabled == ["gone"]
    for name, text in [
        ("slow", "slow"),
        ("flaky", "flaky"),
        ("cut", "whole"),
        ("dropped", "whole"),
        ("busy", "busy"),
    ]:
        assert ends[name] == Delivered(ToolResult(True, text))
    assert ends["good"] == Delivered(ToolResult(True, "good"))
    assert ends["later"] == Delivered(None)
    whys = {name: end.why for name, end in ends.items() if isinstance(end, GaveUp)}
    assert whys == {
        "hangs": Why.DEADLINE,
        "silent": Why.DEADLINE,
        "redirect": Why.DEADLINE,
        "huge": Why.BAD_REPLY,
        "garbage": Why.BAD_REPLY,
        "gone": Why.ENDPOINT_DISABLED,
    }
    assert "inside" not in repr(ends)  # what a receiver wrote is shown to nobody
    got = receiver.got()
    assert {right for *_, right in got} == {"right\n"}
    assert {(path, event) for path, event, *_ in got} == {(f"/{name}", f"msg_{name}") for name in names}
    assert [path for path, *_ in got].count("/good") == 1  # no redirect was followed


async def test_a_receiver_that_is_down_gets_it_when_it_is_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    desk = Desk(port)
    desk.courier.start()
    endpoint = await desk.call("good")
    async with asyncio.timeout(PATIENCE):
        while not desk.box.ledger.of_endpoint(endpoint.id)[0].tries:  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.01)
    receiver = await asyncio.to_thread(Receiver, port)
    told = await asyncio.wait_for(desk.courier.outcomes.get(), PATIENCE)
    assert isinstance(told, Outcome)
    assert told.ending == Delivered(ToolResult(True, "good"))
    await desk.close()
    receiver.close()


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """Of hooks.example, signed by itself; and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    command += " -subj /CN=hooks -addext subjectAltName=DNS:hooks.example"
    subprocess.run([*command.split(), "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


async def test_a_certificate_is_checked_by_the_hosts_name(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    names: list[str | None] = []

    def note(sock: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        names.append(name)

    context.sni_callback = note

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 204 x\r\n\r\n")
        await writer.drain()
        writer.close()

    class Here:
        async def resolve(self, host: str, port: int) -> list[str]:
            return ["127.0.0.1"]

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    policy, trust = AddressPolicy(allow_private=True), ssl.create_default_context(cafile=cert)
    post = Post(f"https://hooks.example:{port}/", {}, b"", PATIENCE)
    assert await HttpSender(policy, Here(), trust=trust).send(post) == Answered(204)
    other = Post(f"https://other.example:{port}/", {}, b"", PATIENCE)
    for sender, wrong in (
        (HttpSender(policy, Here(), trust=trust), other),
        (HttpSender(policy, Here()), post),
    ):
        reply = await sender.send(wrong)
        assert reply == Failed(Fault.TLS, "the certificate is not valid for this host")
    assert names == ["hooks.example", "other.example", "hooks.example"]
    server.close()
    await server.wait_closed()


def run_sender(folder: Path, port: int, point: str, *events: str) -> tuple[list[str], int]:
    fork = Fork(webhook_sender.run, str(folder), port, SECRET, point, *events)
    lines, code = list(fork.lines()), fork.wait()
    fork.close()
    return lines, code


def test_a_sender_that_is_killed_at_any_point_loses_nothing(tmp_path: Path, receiver: Receiver) -> None:
    """Each life begins with what the one before it owes, accepts two more, and dies at another point; the
    last one lives. Each accepted event was received, with one id and body, and its end was told."""
    receiver.got()
    first = "accepted.untold"  # so that the start of the next life has something to read
    points = [first, *random.Random(6).sample(sorted({*POINTS} - {first}), len(POINTS) - 1)]
    accepted: list[str] = []
    told: list[str] = []
    asked: list[str] = []
    for life, point in enumerate([*points, "-"]):
        events = [f"{life}a", f"{life}b"]
        lines, code = run_sender(tmp_path, receiver.port, point, *events)
        assert code == (0 if point == "-" else -9), (point, lines)
        asked += events
        accepted += [line.split()[1] for line in lines if line.startswith("accepted")]
        told += [line.split()[1] for line in lines if line.startswith("ended")]
        assert all(line.endswith("Delivered") for line in lines if line.startswith("ended"))
    got = receiver.got()
    assert len(accepted) >= 6
    assert set(accepted) <= {event for _, event, *_ in got} <= set(asked)
    assert set(accepted) <= set(told)
    assert all((body, right) == (event, "right\n") for _, event, body, right in got)
    # Nothing is left: another life has nothing to do.
    assert run_sender(tmp_path, receiver.port, "-") == ([], 0)
    assert receiver.got() == []


def test_kill_dash_nine_from_outside(tmp_path: Path, receiver: Receiver) -> None:
    """At a moment that nobody chose."""
    receiver.got()
    accepted: set[str] = set()
    told: set[str] = set()
    for life in range(4):
        events = [f"k{life}x{n}" for n in range(200)]
        sender = Fork(webhook_sender.run, str(tmp_path), receiver.port, SECRET, "-", *events)
        lines = [sender.line() for _ in range(10 + 17 * life)]
        sender.kill()
        lines += sender.lines()
        sender.close()
        whole = [line.split() for line in lines]
        accepted |= {words[1] for words in whole if words[0] == "accepted"}
        told |= {words[1] for words in whole if words[0] == "ended"}
    lines, code = run_sender(tmp_path, receiver.port, "-")
    assert code == 0
    told |= {line.split()[1] for line in lines}
    assert len(accepted) >= 10
    assert accepted <= {event for _, event, *_ in receiver.got()}
    assert accepted <= told
