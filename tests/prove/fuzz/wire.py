"""A client that writes any bytes and reads what comes, for as long as it likes."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

PATIENCE = 4.0  # seconds; who asked for something long leaves then


@dataclass(frozen=True)
class Heard:
    """status None: nothing came (the server closed, or nothing was to come in time)."""

    status: int | None
    headers: dict[str, str]
    body: bytes
    left: bool  # the client had enough before it was whole

    @property
    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    @property
    def code(self) -> str:
        told = self.json
        error = told.get("error") if isinstance(told, dict) else None
        return str(error.get("code") or error.get("type")) if isinstance(error, dict) else ""


async def exchange(port: int, data: bytes, *, patience: float = PATIENCE, enough: int = 200_000) -> Heard:
    """Send it all, read to the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    raw = bytearray()
    left = False

    async def send() -> None:
        with suppress(ConnectionError):
            writer.write(data)
            await writer.drain()

    sender = asyncio.create_task(send())
    try:
        async with asyncio.timeout(patience):
            while len(raw) < enough and (piece := await reader.read(65536)):
                raw += piece
        left = len(raw) >= enough
    except TimeoutError:
        left = True
    except ConnectionError:
        pass
    finally:
        sender.cancel()
        writer.close()
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(1):
                await writer.wait_closed()
    return heard(bytes(raw), left)


def heard(raw: bytes, left: bool) -> Heard:
    while True:
        head, _, body = raw.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        parts = lines[0].split(" ")
        status = int(parts[1]) if len(parts) > 1 and parts[1].isdecimal() else None
        if status != 100:
            break
        raw = body
    pairs = (line.partition(":") for line in lines[1:])
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    if headers.get("transfer-encoding") == "chunked":
        body = _unchunked(body)
    return Heard(status, headers, body, left)


def _unchunked(body: bytes) -> bytes:
    out = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        try:
            length = int(size, 16)
        except ValueError:
            break
        out += rest[:length]
        body = rest[length + 2 :]
    return out
