"""What is dialled for a URL: what was judged, and nothing else."""

import asyncio
import socket
import ssl
import threading

import pytest

from tests.ssrf_tricks import BROKEN, INSIDE, NOBODYS, TRICKS
from tests.wire_rig import Names, Wire, answer, post, sender
from tools_bridge.webhooks import dial
from tools_bridge.webhooks.address import AddressPolicy, Refused
from tools_bridge.webhooks.dial import NotResolved, PinnedBackend, SystemResolver
from tools_bridge.webhooks.replies import Answered, Failed, Fault

# --- what is dialled ---------------------------------------------------------------------


@pytest.mark.parametrize("url", TRICKS)
async def test_no_trick_asks_or_dials(url):
    wire, names = Wire(answer()), Names(["1.1.1.1"])
    reply = await sender(wire, names, AddressPolicy()).send(post(url))
    assert isinstance(reply, Failed)
    assert reply.fault is Fault.REFUSED
    assert (wire.dialled, names.asked) == ([], [])


@pytest.mark.parametrize("address", INSIDE + NOBODYS + BROKEN)
async def test_no_name_leads_inside(address):
    for answers in ([address], ["1.1.1.1", address], [address, "1.1.1.1"]):
        wire, names = Wire(answer()), Names(answers)
        reply = await sender(wire, names).send(post())
        assert reply.fault is Fault.REFUSED
        assert wire.dialled == []
        assert names.asked == [("a.example", 80)]


async def test_a_name_is_resolved_once_and_that_answer_is_dialled():
    wire, names = Wire(answer(b'{"output": "x"}')), Names(["1.1.1.1"], ["127.0.0.1"])
    reply = await sender(wire, names).send(post())
    assert reply == Answered(200, None, "application/json", "", b'{"output": "x"}')
    assert wire.dialled == [("1.1.1.1", 80)]
    assert names.asked == [("a.example", 80)]
    assert wire.closed


async def test_the_next_attempt_asks_again_and_is_refused():
    wire, names = Wire(answer()), Names(["1.1.1.1"], ["127.0.0.1"])
    sending = sender(wire, names)
    assert isinstance(await sending.send(post()), Answered)
    assert (await sending.send(post())).fault is Fault.REFUSED
    assert wire.dialled == [("1.1.1.1", 80)]


async def test_addresses_are_tried_in_order():
    wire = Wire(answer(), fails=("1.1.1.1", "2606:4700::1"))
    reply = await sender(wire, Names(["1.1.1.1", "2606:4700::1", "::ffff:8.8.8.8", "9.9.9.9"])).send(post())
    assert reply.status == 200
    assert wire.dialled == [("1.1.1.1", 80), ("2606:4700::1", 80), ("8.8.8.8", 80)]


async def test_an_address_is_dialled_without_asking():
    wire, names = Wire(answer()), Names([])
    assert (await sender(wire, names).send(post("http://[2606:4700::1]:8080/x"))).status == 200
    assert wire.dialled == [("2606:4700::1", 8080)]
    assert names.asked == []
    assert b"host: [2606:4700::1]:8080\r\n" in wire.sent


async def test_a_connection_that_came_out_elsewhere_is_closed_unused():
    wire = Wire(answer(), place="127.0.0.1")
    assert (await sender(wire).send(post())).fault is Fault.REFUSED
    assert wire.sent == b""
    assert wire.closed == 1


async def test_the_backend_dials_nothing_else():
    wire = Wire()
    backend = PinnedBackend(wire, "a.example", 80, [], None)
    for other in (("b.example", 80), ("a.example", 81), ("127.0.0.1", 80)):
        with pytest.raises(Refused):
            await backend.connect_tcp(*other)
    with pytest.raises(Refused):
        await backend.connect_unix_socket("/run/docker.sock")
    assert wire.dialled == []


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_not_followed(status):
    head = b"location: http://127.0.0.1/\r\n"
    wire, names = Wire(answer(b"", head, b"%d Go" % status)), Names(["1.1.1.1"])
    assert (await sender(wire, names).send(post())).status == status
    assert (wire.dialled, names.asked) == ([("1.1.1.1", 80)], [("a.example", 80)])


@pytest.mark.parametrize(
    "name", ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"]
)
async def test_proxies_of_the_environment_are_not_used(monkeypatch, name):
    monkeypatch.setenv(name, "http://127.0.0.1:3128")
    wire = Wire(answer())
    assert (await sender(wire).send(post())).status == 200
    assert wire.dialled == [("1.1.1.1", 80)]
    assert wire.sent.startswith(b"POST /hook HTTP/1.1\r\n")


async def test_tls_is_of_the_name_and_the_request_says_it():
    wire = Wire(answer())
    assert (
        await sender(wire, policy=AddressPolicy()).send(post("https://A.example:8443/hook?x=1"))
    ).status == 200
    assert wire.dialled == [("1.1.1.1", 8443)]
    assert wire.tls == [("a.example", ssl.CERT_REQUIRED, True)]
    head, _, body = wire.sent.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /hook?x=1 HTTP/1.1"
    assert body == b'{"a":1}'
    for line in (
        b"host: a.example:8443",
        b"webhook-id: msg_1",
        b"accept-encoding: identity",
        b"connection: close",
    ):
        assert lines.count(line) == 1
    assert lines.count(b"content-length: 7") == 1


@pytest.mark.parametrize(
    "last", [("fe80::1%2", 443, 0, 2), ("fd00::5", 443, 0, 0), ("169.254.169.254", 443), ("10.0.0.1", 443)]
)
async def test_the_end_of_a_chain_of_names_is_judged(monkeypatch, last):
    """Whatever the names on the way were called, and of whichever family its addresses are."""
    asked = []

    def look_up(host, port, **how):
        asked.append((host, port))
        kind = socket.AF_INET6 if ":" in last[0] else socket.AF_INET
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "edge.a.example", ("1.1.1.1", 443)),
            (kind, socket.SOCK_STREAM, 6, "", last),
        ]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    wire = Wire(answer())
    reply = await sender(wire, SystemResolver(), AddressPolicy()).send(post("https://a.example/hook"))
    assert reply.fault is Fault.REFUSED
    assert wire.dialled == []
    assert asked == [("a.example", 443)]


async def test_the_machine_resolves_names_and_says_which_it_cannot():
    resolver = SystemResolver()
    assert await resolver.resolve("127.0.0.1", 80) == ["127.0.0.1"]
    with pytest.raises(NotResolved):
        await resolver.resolve("a" * 70 + ".invalid", 80)  # no name: nobody is asked


async def test_who_asks_for_a_name_that_is_being_asked_for_waits_for_that(monkeypatch):
    asked, gate = [], threading.Event()

    def slow(host, port):
        asked.append(host)
        assert gate.wait(60)
        return ["1.1.1.1"]

    monkeypatch.setattr(dial, "_look_up", slow)
    resolver = SystemResolver()
    tasks = [asyncio.create_task(resolver.resolve("a.example", 443)) for _ in range(5)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(*tasks[1:]) == [["1.1.1.1"]] * 4
    assert asked == ["a.example"]
    assert await resolver.resolve("a.example", 443) == ["1.1.1.1"]
    assert len(asked) == 2


async def test_names_that_are_being_resolved_are_bounded(monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(dial, "_MOST_ASKED", 2)
    monkeypatch.setattr(dial, "_look_up", lambda host, port: gate.wait(60) and ["1.1.1.1"])
    resolver = SystemResolver()
    tasks = [asyncio.create_task(resolver.resolve(f"{name}.example", 443)) for name in "ab"]
    await asyncio.sleep(0)
    with pytest.raises(NotResolved, match="too many"):
        await resolver.resolve("c.example", 443)
    gate.set()
    assert await asyncio.gather(*tasks) == [["1.1.1.1"]] * 2
    assert await resolver.resolve("c.example", 443) == ["1.1.1.1"]
