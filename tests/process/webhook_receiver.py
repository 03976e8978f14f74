"""A receiver of webhooks, in a process of its own: each path behaves badly in its way.

It says its port, then a line for every request that it got whole: path, id, body, and whether the signature
is right; where it is not, nothing more happens. `run`: the secret of all endpoints whose path has no other
(`POST /secret/PATH`), and its port (0: any). `GET /mark`: it says `mark`.

What it is asked to do it does once for each id, however often it is asked: `GET /effects` says for what, and
how often.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from urllib.request import Request, urlopen

from tools_bridge.webhooks.signing import BadSignature, verify

SKEW = 3600.0  # seconds that the clock of `/skewed` is behind, and that of `/mended` at first


def answer(status: int, body: bytes = b"", more: str = "", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    head = f"HTTP/1.1 {status} x\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n{more}\r\n"
    return head.encode() + body


def result(text: str) -> bytes:
    return answer(200, json.dumps({"output": text}).encode())


def post(url: str, text: str) -> int:
    asked = Request(url, json.dumps({"output": text}).encode(), {"content-type": "application/json"})
    with urlopen(asked, timeout=30) as reply:
        status: int = reply.status
        return status


class Receiver:
    def __init__(self, say: Callable[[str], None], secret: str) -> None:
        self.say, self.secret = say, secret
        self.secrets: dict[str, str] = {}  # of paths
        self.seen: Counter[tuple[str, str]] = Counter()
        self.effects: Counter[str] = Counter()
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.split("\r\n")
            path = first.split()[1]
            if path == "/mark":
                self.say("mark")
                writer.write(answer(204))
            elif path == "/effects":
                writer.write(answer(200, json.dumps(self.effects).encode()))
            else:
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                body = await reader.readexactly(int(headers["content-length"]))
                if path.startswith("/secret/"):
                    self.secrets[path.removeprefix("/secret")] = body.decode()
                    writer.write(answer(204))
                else:
                    await self.take(path, headers, body, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def take(
        self, path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        event = headers["webhook-id"]
        times = self.seen[path, event] = self.seen[path, event] + 1
        behind = SKEW if path == "/skewed" or (path == "/mended" and times == 1) else 0.0
        try:
            verify([self.secrets.get(path, self.secret)], headers, body, time.time() - behind)
            right = "right"
        except BadSignature as bad:
            right = str(bad)
        self.say(f"{path} {event} {body.decode()} {right}\n")
        if right != "right":
            writer.write(answer(400))
            return
        if event not in self.effects:
            self.effects[event] += 1
        await self.behave(path, times, body, writer)

    async def behave(self, path: str, times: int, body: bytes, writer: asyncio.StreamWriter) -> None:
        match path.split("/")[1]:
            case "good" | "mended":
                writer.write(result("good"))
            case "sunny":
                writer.write(result("Sunny, 24 degrees."))
            case "events":
                writer.write(answer(204))
            case "later":
                writer.write(answer(202))
            case "slow":
                await asyncio.sleep(0.3)
                writer.write(result("slow"))
            case "flaky":
                writer.write(answer(500) if times == 1 else result("flaky"))
            case "early":  # the result comes by the callback before the reply, and then in the reply
                url = json.loads(body)["data"]["required_action"]["callback_url"]
                assert await asyncio.to_thread(post, url, "early") == 202
                writer.write(result("another"))
            case "cut" if times == 1:
                writer.write(answer(200, b'{"output": "c', length=100))
            case "dropped" if times == 1:
                return  # it was read, and perhaps acted upon
            case "cut" | "dropped":
                writer.write(result("whole"))
            case "hangs":
                writer.write(answer(200, b'{"output": "h', length=100))
                await writer.drain()
                await asyncio.sleep(3600)
            case "silent":
                await asyncio.sleep(3600)
            case "huge":
                writer.write(answer(200, length=100_000_000))
                for _ in range(100):
                    writer.write(b"x" * 1_000_000)
                    await writer.drain()
            case "redirect":
                writer.write(answer(307, more=f"location: http://127.0.0.1:{self.port}/good\r\n"))
            case "gone":
                writer.write(answer(410))
            case "garbage":
                writer.write(answer(200, b"<html>secret of the inside</html>"))
            case "busy":
                writer.write(answer(503, more="retry-after: 1\r\n") if times == 1 else result("busy"))


async def main(say: Callable[[str], None], secret: str, port: int) -> None:
    receiver = Receiver(say, secret)
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", port)
    receiver.port = server.sockets[0].getsockname()[1]
    say(str(receiver.port))
    async with server:
        await server.serve_forever()


def run(say: Callable[[str], None], secret: str, port: int) -> None:
    asyncio.run(main(say, secret, port))
