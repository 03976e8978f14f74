"""An agent in thirty lines: python examples/client_agent.py [URL [MODEL]], beside `make serve`."""

import asyncio
import sys
from typing import Literal

from agentserve.client import AsyncClient, TextDelta, ToolCalled, tool

URL, MODEL = [*sys.argv[1:], *["http://127.0.0.1:8000", "smollm2-135m"][len(sys.argv) - 1 :]]


@tool(timeout=10)
async def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather of a city."""
    return f"sunny, 24 degrees in {city}"


@tool
def clock(zone: str = "UTC") -> dict[str, str]:
    """What time it is: a plain function runs in a thread."""
    return {"zone": zone, "time": "12:34"}


async def main() -> None:
    async with (
        AsyncClient(URL) as client,
        await client.sessions.create(MODEL, instructions="Be brief.", tools=[weather, clock]) as session,
    ):
        turn = session.run("What are the weather and the time in Oslo?")
        async for event in turn:
            match event:
                case ToolCalled(call=call):
                    print(f"call: {call.name}({call.arguments})")
                case TextDelta(text=text):
                    print(text, end="", flush=True)
        print(f"\n{(await turn.result()).status}: {turn.refused or 'every result was taken'}")


asyncio.run(main())
