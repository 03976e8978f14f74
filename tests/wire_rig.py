"""A network and a name server of webhooks that a test scripts."""

import asyncio

import httpcore

from tools_bridge.webhooks.address import AddressPolicy
from tools_bridge.webhooks.attempt import HttpSender, Post, SendLimits

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
