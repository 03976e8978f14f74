"""Clients that leave, and sessions that are closed, in every state that a client can see, on the whole
server with the real model: no turn, task, lock, live page or transfer stays, and who comes next is told
what the first one was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.process.abort_desk import Desk, desk
from tests.process.abort_places import PLACES

pytestmark = [pytest.mark.process, pytest.mark.model]

SESSIONS = 200  # per state, its ways in turns
WAYS = ("leave", "delete")


async def ended(served: Desk, place: str, way: str, name: str) -> str:
    """One session's life and end. Returns the way it took: without a client nobody can leave."""
    guest, rest = await PLACES[place](served, name)
    if guest is None:
        way = "delete"
    if way == "delete" or guest is None:
        closing = await served.delete(name)
        await rest()
        assert (await served.whole(closing))["deleted"]
        if guest is not None:
            guest.leave()
        assert served.session(name) is None
    else:
        guest.leave()
        await rest()
    await served.rest()
    return way


async def follower(served: Desk, number: int) -> list[int]:
    """What somebody is told who comes afterwards."""
    fields = {"max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
    reply = await served.whole(await served.chat(f"follower-{number}", "Who are you?", **fields))
    ids: list[int] = reply["choices"][0]["token_ids"]
    assert len(ids) == 4
    return ids


async def run(folder: Path, sessions: Sequence[tuple[str, str]]) -> Counter[str]:
    """Sessions as (state, way) one after the other; how many of each."""
    done: Counter[str] = Counter()
    async with desk(folder) as served:
        served.count_tasks()
        first = await follower(served, 0)
        for number, (place, way) in enumerate(sessions, 1):
            taken = await ended(served, place, way, f"session-{number}")
            done[f"{place}: {taken}"] += 1
            if number % 5 == 0 or number == len(sessions):
                assert await follower(served, number) == first
                await served.rest()
        faults = {name: count for name, count in served.tiers().faults.items() if name != "late"}
        assert faults == {}
    return done


async def test_aborts_of_the_whole_server_slice(tmp_path: Path) -> None:
    await run(tmp_path, [(place, WAYS[at % 2]) for at, place in enumerate(PLACES)])


@pytest.mark.prove
@pytest.mark.parametrize("place", PLACES)
async def test_aborts_of_the_whole_server(place: str, tmp_path: Path, tell: Callable[[str], None]) -> None:
    done = await run(tmp_path, [(place, WAYS[number % 2]) for number in range(SESSIONS)])
    tell(", ".join(f"{what} {count}" for what, count in done.items()))
