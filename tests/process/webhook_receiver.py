"""A receiver of webhooks, in a process of its own: each path behaves badly in its way.

It prints its port, then a line for every request that it got whole: path, id, and whether the signature is
right. Its argument: the secret of all endpoints.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from tools_bridge.webhooks.signing import BadSignature, verify

seen: dict[tuple[str, str], int] = {}


def answer(status: int, body: bytes = b"", more: str = "", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    head = f"HTTP/1.1 {status} x\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n{more}\r\n"
    return head.encode() + body


def result(text: str) -> bytes:
    return answer(200, json.dumps({"output": text}).encode())


async def behave(path: str, times: int, writer: asyncio.StreamWriter, port: int) -> None:
    match path.split("/")[1]:
        case "good":
            writer.write(result("good"))
        case "later":
            writer.write(answer(202))
        case "slow":
            await asyncio.sleep(0.3)
            writer.write(result("slow"))
        case "flaky":
            writer.write(answer(500) if times == 1 else result("flaky"))
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
            writer.write(answer(307, more=f"location: http://127.0.0.1:{port}/good\r\n"))
        case "gone":
            writer.write(answer(410))
        case "garbage":
            writer.write(answer(200, b"<html>secret of the inside</html>"))
        case "busy":
            writer.write(answer(503, more="retry-after: 1\r\n") if times == 1 else result("busy"))


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str) -> None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = await reader.readexactly(int(headers["content-length"]))
        path = first.split()[1]
        try:
            verify([secret], headers, body, time.time())
            right = "right"
        except BadSignature as bad:
            right = str(bad)
        event = headers["webhook-id"]
        seen[path, event] = seen.get((path, event), 0) + 1
        print(path, event, body.decode(), right, flush=True)
        await behave(path, seen[path, event], writer, writer.get_extra_info("sockname")[1])
        await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def main() -> None:
    server = await asyncio.start_server(
        lambda reader, writer: serve(reader, writer, sys.argv[1]), "127.0.0.1", int(sys.argv[2])
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
