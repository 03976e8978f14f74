"""One attempt on the wire: what is dialled is what was checked, and what comes back is bounded."""

import asyncio
import gzip
import ssl
import threading

import httpcore
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_webhook_address import BROKEN, INSIDE, NOBODYS, TRICKS
from tools_bridge.webhooks import dial
from tools_bridge.webhooks.address import AddressPolicy, Refused
from tools_bridge.webhooks.attempt import HttpSender, Post, SendLimits
from tools_bridge.webhooks.dial import NotResolved, PinnedBackend, SystemResolver
from tools_bridge.webhooks.replies import Answered, Failed, Fault

LIMITS = SendLimits(head_bytes=4096, body_bytes=10_000)
OPEN = AddressPolicy(allow_http=True)
FOREVER = object()


class Names:
    """Answers each question with the next of its answers, and counts them."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    async def resolve(self, host, port):
        self.asked.append((host, port))
        answer = self.answers[min(len(self.asked), len(self.answers)) - 1]
        if answer is FOREVER:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return answer


class Wire(httpcore.AsyncNetworkBackend):
    """A network that answers with pieces, or fails; it records what was dialled and sent."""

    def __init__(self, *pieces, fails=(), place=None):
        self.pieces, self.fails, self.place = list(pieces), fails, place
        self.dialled, self.sent, self.read, self.closed, self.tls = [], b"", 0, 0, []

    async def connect_tcp(self, host, port, timeout=None, local_address=None, socket_options=None):  # noqa: ASYNC109
        self.dialled.append((host, port))
        if host in self.fails:
            raise httpcore.ConnectError("refused")
        return Stream(self, (self.place or host, port))

    async def connect_unix_socket(self, path, timeout=None, socket_options=None):  # noqa: ASYNC109
        self.dialled.append(path)
        raise AssertionError

    async def sleep(self, seconds):
        raise AssertionError


class Stream(httpcore.AsyncNetworkStream):
    def __init__(self, wire, place):
        self.wire, self.place = wire, place

    async def read(self, max_bytes, timeout=None):  # noqa: ASYNC109
        wire = self.wire
        if not wire.pieces:
            return b""
        if wire.pieces[0] is FOREVER:
            await asyncio.Event().wait()
        if isinstance(wire.pieces[0], Exception):
            raise wire.pieces[0]
        piece = wire.pieces.pop(0)
        data, rest = piece[:max_bytes], piece[max_bytes:]
        if rest:
            wire.pieces.insert(0, rest)
        wire.read += len(data)
        return data

    async def write(self, buffer, timeout=None):  # noqa: ASYNC109
        self.wire.sent += buffer

    async def aclose(self):
        self.wire.closed += 1

    async def start_tls(self, ssl_context, server_hostname=None, timeout=None):  # noqa: ASYNC109
        self.wire.tls.append((server_hostname, ssl_context.verify_mode, ssl_context.check_hostname))
        return self

    def get_extra_info(self, info):
        return self.place if info == "server_addr" else None


def sender(wire, names=None, policy=OPEN):
    return HttpSender(policy, names or Names(["1.1.1.1"]), LIMITS, backend=wire)


def post(url="http://a.example/hook", seconds=30.0, body=b'{"a":1}', wants_body=True):
    return Post(url, {"webhook-id": "msg_1", "webhook-signature": "v1,x"}, body, seconds, wants_body)


def answer(body=b"{}", head=b"content-type: application/json\r\n", status=b"200 OK"):
    return b"HTTP/1.1 %s\r\n%scontent-length: %d\r\n\r\n%s" % (status, head, len(body), body)


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


# --- what comes back -----------------------------------------------------------------------


async def test_a_large_body_is_cut_while_it_comes():
    one_more = b"x" * (LIMITS.body_bytes + 1)
    for wire in (
        Wire(answer(one_more)),
        Wire(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2711\r\n" + one_more + b"\r\n0\r\n\r\n"),
        Wire(answer(b"x" * 50_000_000)),
        Wire(b"HTTP/1.1 200 OK\r\n\r\n", *[b"x" * 1000] * 100_000),
        Wire(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", *[b"1\r\nx\r\n"] * 100_000),
    ):
        reply = await sender(wire).send(post())
        assert (reply.fault, reply.status) == (Fault.TOO_LARGE, 200)
        assert wire.read < 200_000
        assert wire.closed


async def test_a_body_of_just_the_size_is_taken_also_in_single_bytes():
    body = b"x" * LIMITS.body_bytes
    pieces = [b"1\r\nx\r\n"] * len(body) + [b"0\r\n\r\n"]
    for wire in (Wire(answer(body)), Wire(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", *pieces)):
        reply = await sender(wire).send(post())
        assert reply.body == body


@pytest.mark.parametrize(
    "pieces",
    [
        [b"HTTP/1.1 200 OK\r\n", *[b"x-%d: y\r\n" % n for n in range(100_000)]],
        [b"HTTP/1.1 200 OK\r\nx: ", *[b"y" * 1000] * 1000],
        [b"HTTP/1.1 100 Continue\r\n\r\n"] * 100_000,
        [b"x" * 1000] * 1000,
        [b"\r\n" * 1000] * 1000,
    ],
)
async def test_a_head_is_bounded(pieces):
    wire = Wire(*pieces)
    reply = await sender(wire).send(post())
    assert reply.fault in (Fault.TOO_LARGE, Fault.PROTOCOL)
    assert wire.read <= LIMITS.head_bytes
    assert wire.closed


async def test_nobody_reads_what_is_not_wanted():
    for wire, wants in (
        (Wire(answer(b"x" * 10**6)), False),
        (Wire(answer(b"x" * 10**6, status=b"500 No")), True),
    ):
        reply = await sender(wire).send(post(wants_body=wants))
        assert reply.body == b""
        assert wire.read <= LIMITS.head_bytes


async def test_compressed_bodies_stay_as_they_are():
    bomb = gzip.compress(bytes(9_000_000))
    assert len(bomb) < LIMITS.body_bytes
    reply = await sender(Wire(answer(bomb, b"content-encoding: gzip\r\n"))).send(post())
    assert reply.content_encoding == "gzip"
    assert reply.body == bomb


@pytest.mark.parametrize(
    ("pieces", "fault"),
    [
        ([], Fault.PROTOCOL),
        ([b"HTTP/1.1 200"], Fault.PROTOCOL),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nxx"], Fault.PROTOCOL),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n"], Fault.PROTOCOL),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nxx"], Fault.PROTOCOL),
        ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"], Fault.PROTOCOL),
        ([b"SSH-2.0-OpenSSH_9.2\r\n"], Fault.PROTOCOL),
        ([b"\0\xff" * 20], Fault.PROTOCOL),
        ([httpcore.ReadError("reset")], Fault.PROTOCOL),
        ([httpcore.ReadTimeout()], Fault.TIMEOUT),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nxx", httpcore.ReadTimeout()], Fault.TIMEOUT),
        ([FOREVER], Fault.TIMEOUT),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nxx", FOREVER], Fault.TIMEOUT),
        ([RuntimeError("a library's own")], Fault.INTERNAL),
    ],
)
async def test_whatever_a_receiver_does_is_a_value(pieces, fault):
    wire = Wire(*pieces)
    reply = await sender(wire).send(post(seconds=0.05 if FOREVER in pieces else 30.0))
    assert reply.fault is fault
    assert wire.closed
    assert "SSH" not in str(reply)


async def test_a_change_of_protocol_that_was_not_asked_for_is_a_failure():
    reply = await sender(Wire(b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n")).send(
        post()
    )
    assert reply.fault is Fault.PROTOCOL


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        (Names(NotResolved("Name or service not known")), Fault.RESOLVE),
        (Names([]), Fault.REFUSED),
        (Names(FOREVER), Fault.TIMEOUT),
        (Names(OSError("odd")), Fault.CONNECT),
    ],
)
async def test_whatever_a_name_server_does_is_a_value(names, fault):
    wire = Wire(answer())
    reply = await sender(wire, names).send(post(seconds=0.05 if FOREVER in names.answers else 30.0))
    assert reply.fault is fault
    assert wire.dialled == []


async def test_nobody_there():
    wire = Wire(fails=("1.1.1.1", "8.8.8.8"))
    reply = await sender(wire, Names(["1.1.1.1", "8.8.8.8"])).send(post())
    assert reply == Failed(Fault.CONNECT)


async def test_being_cancelled_closes_the_connection():
    wire = Wire(FOREVER)
    task = asyncio.create_task(sender(wire).send(post()))
    while not wire.sent:  # noqa: ASYNC110
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert wire.closed


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


HEADS = [
    b"HTTP/1.1 200 OK\r\n",
    b"HTTP/1.0 200 OK\r\n",
    b"HTTP/1.1 100 x\r\n\r\n",
    b"HTTP/1.1 204\r\n",
    b"HTTP/2 200\r\n",
]
LINES = [
    *(
        b"content-length: 5\r\n",
        b"content-length: -1\r\n",
        b"content-length: 99999999999999999999\r\n",
        b"x\r\n",
    ),
    *(b"transfer-encoding: chunked\r\n", b"transfer-encoding: gzip, chunked\r\n", b": y\r\n", b" folded\r\n"),
    *(b"content-encoding: gzip\r\n", b"connection: keep-alive\r\n", b"upgrade: h2c\r\n", b"x: \xff\0\r\n"),
    *(b"retry-after: x\r\n", b"content-type: application/json\r\n", b"\r\n", b"\n", b"\r\n\r\n"),
]
REST = [
    b"{}",
    b"hello",
    b"5\r\nhello\r\n",
    b"0\r\n\r\n",
    b"0\r\nx: y\r\n\r\n",
    b"fffffffffffffffff\r\n",
    b"5;ext=1\r\n",
]
ANYTHING = st.lists(st.sampled_from([*HEADS, *LINES, *REST]) | st.binary(max_size=20), max_size=12)


@given(st.sampled_from([*HEADS, b""]), ANYTHING)
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_an_answer_or_a_defined_failure(first, pieces):
    wire = Wire(first, *pieces)
    reply = asyncio.run(sender(wire).send(post()))
    assert isinstance(reply, Answered | Failed)
    assert getattr(reply, "fault", None) is not Fault.INTERNAL
    assert wire.closed


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
