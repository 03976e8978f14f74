"""The states of a session that a client can see, and how the real server gets there.

Each function brings session `name` into its state and returns the connection of its client, if one is
open, and what is to be done once the session has been ended.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from tests.api_rig import TOOLS
from tests.process.abort_desk import Desk, Guest
from tiering.policy.base import Signal

FORCED = {"type": "function", "function": {"name": "weather"}}
LONG = {"max_tokens": 400, "ignore_eos": True}

Rest = Callable[[], Awaitable[None]]
Place = Callable[[Desk, str], Awaitable[tuple[Guest | None, Rest]]]


async def nothing() -> None: ...


async def queued(desk: Desk, name: str) -> tuple[Guest, Rest]:
    others = [await desk.chat(f"{name}-{other}", "Count.", **LONG, stream=True) for other in "ab"]
    for other in others:
        await other.until(b"data: ")
    guest = await desk.chat(name, "Hello.", **LONG)
    await desk.until(lambda: desk.state(name) == "WAITING")

    async def rest() -> None:
        for other in others:
            other.leave()

    return guest, rest


async def prefilling(desk: Desk, name: str) -> tuple[Guest, Rest]:
    words = " ".join(f"{name} {number}" for number in range(55))
    guest = await desk.chat(name, words, **LONG)
    await desk.until(lambda: desk.state(name) == "PREFILLING")
    return guest, nothing


def decoding(stream: bool) -> Place:
    async def reach(desk: Desk, name: str) -> tuple[Guest, Rest]:
        guest = await desk.chat(name, "Tell a story.", **LONG, stream=stream)
        if stream:
            await guest.until(b'"content":')
        await desk.until(lambda: desk.state(name) == "DECODING")
        return guest, nothing

    return reach


async def in_a_tool_call(desk: Desk, name: str) -> tuple[Guest, Rest]:
    fields = {"tools": TOOLS, "tool_choice": FORCED, "max_tokens": 60, "stream": True}
    guest = await desk.chat(name, "Weather?", **fields)
    await guest.until(b"arguments")
    return guest, nothing


async def called(desk: Desk, name: str, text: str = "Weather?") -> str:
    """A session that waits for its tool: the call's id."""
    guest = await desk.chat(name, text, tools=TOOLS, tool_choice=FORCED, max_tokens=60)
    reply: Any = await desk.whole(guest)
    assert reply["choices"][0]["finish_reason"] != "length", "the call is whole"
    found: str = reply["choices"][0]["message"]["tool_calls"][0]["id"]
    return found


async def waiting_for_a_tool(desk: Desk, name: str) -> tuple[None, Rest]:
    await called(desk, name)
    return None, nothing


async def being_written(desk: Desk, name: str) -> tuple[None, Rest]:
    """Its KV is on its way to a disk that is slow."""
    desk.arm("slow")
    await called(desk, name, " ".join(f"{name} {number}" for number in range(10)))
    while not (view := await desk.worker()).tiers or not view.tiers.moving:
        pass

    async def rest() -> None:
        desk.arm("")

    return None, rest


async def loading_from_disk(desk: Desk, name: str) -> tuple[Guest, Rest]:
    """Others have taken its place on the device and in the host, and the disk is slow."""
    words = " ".join(f"{name} {number}" for number in range(20))
    call = await called(desk, name, words)
    for other in "ab":  # each almost as large as the pool
        words = " ".join(f"{other} {number}" for number in range(110))
        reply = await desk.whole(await desk.chat(f"{name}-{other}", f"{name} {words}", max_tokens=1))
        assert 450 < reply["usage"]["prompt_tokens"] < 600
    await desk.rest()
    desk.arm("slow")
    result = {"call_id": call, "content": "rain"}
    guest = await desk.post(f"/agentserve/sessions/{name}/tool_results", result | LONG)
    await desk.until(lambda: desk.tiers().moving > 0 or desk.session(name).committed > 1)
    assert desk.tiers().moving > 0

    async def rest() -> None:
        desk.arm("")

    return guest, rest


def uploading(parts: int) -> Place:
    async def reach(desk: Desk, name: str) -> tuple[Guest, Rest]:
        call = await called(desk, name)
        heard = len(desk.told)
        path = f"/agentserve/sessions/{name}/tool_results/{call}/stream"
        guest = await desk.open("POST", path, "transfer-encoding: chunked\r\n")
        for number in range(parts):
            part = f"line {number} of the tool's output, which is long. ".encode()
            await guest.send(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        wanted = Signal.STREAMING if parts else Signal.CONNECTED
        await desk.until(lambda: wanted in [getattr(news, "signal", None) for news in desk.told[heard:]])
        return guest, nothing

    return reach


async def result_under_way(desk: Desk, name: str) -> tuple[Guest, Rest]:
    """The turn that a tool's result began is decoding; it belongs to the session, not to the client."""
    call = await called(desk, name)
    result = {"call_id": call, "content": "rain", "max_tokens": 60}
    guest = await desk.post(f"/agentserve/sessions/{name}/tool_results", result)
    await desk.until(lambda: desk.state(name) in ("PREFILLING", "DECODING"))
    return guest, nothing


async def being_committed(desk: Desk, name: str) -> tuple[Guest, Rest]:
    """The disk has the turn and has not said so."""
    desk.gate.hold()
    guest = await desk.chat(name, "Hello.", max_tokens=2, ignore_eos=True)
    await desk.until(desk.gate.reached.is_set)

    async def rest() -> None:
        desk.gate.free.set()

    return guest, rest


async def result_being_committed(desk: Desk, name: str) -> tuple[Guest, Rest]:
    call = await called(desk, name)
    desk.gate.hold()
    result = {"call_id": call, "content": "rain", "max_tokens": 2}
    guest = await desk.post(f"/agentserve/sessions/{name}/tool_results", result)
    await desk.until(desk.gate.reached.is_set)

    async def rest() -> None:
        desk.gate.free.set()

    return guest, rest


async def events_being_read(desk: Desk, name: str) -> tuple[Guest, Rest]:
    await called(desk, name)
    guest = await desk.open("GET", f"/agentserve/sessions/{name}/events")
    await guest.until(b"event: turn_completed")
    return guest, nothing


PLACES: dict[str, Place] = {
    "queued": queued,
    "prefilling": prefilling,
    "decoding": decoding(stream=False),
    "decoding, streamed": decoding(stream=True),
    "in a tool call": in_a_tool_call,
    "waiting for a tool": waiting_for_a_tool,
    "waiting, KV being written": being_written,
    "KV being read from disk": loading_from_disk,
    "an upload is open": uploading(0),
    "an upload half streamed": uploading(3),
    "a result's turn under way": result_under_way,
    "a turn being committed": being_committed,
    "a result being committed": result_being_committed,
    "its events being read": events_being_read,
}
