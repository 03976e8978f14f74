"""What it brings to deliver results while the next step computes: two workers, one with and one without.

Both run the same turns in alternation, and say the same tokens or it is an error. What counts is the time of
a step while all turns decode, as the API process sees it.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from statistics import median

import msgspec

from agentserve.bench.report import Row
from agentserve.messages import Submit, Token, TurnEnded, pack_tokens
from agentserve.server.workers.fleet import Fleet
from agentserve.server.workers.spec import WorkerSpec
from agentserve.server.workers.supervisor import WorkerProcess, private_directory
from agentserve.types import Sampling, SessionId, TurnId

SESSIONS = (1, 16, 64)
CONTEXT, TOKENS = 200, 64
SPREAD = 97  # between the first tokens of prompts, so that none shares a prefix


class Differs(ValueError):
    """A token is not the same with and without."""


@dataclass(frozen=True, slots=True)
class Ran:
    step: float  # seconds
    said: list[list[int]]


def measure(
    spec: WorkerSpec, rounds: int, told: Callable[[str], None], sessions: Sequence[int] = SESSIONS
) -> list[Row]:
    """rounds: of with, without, without, with. Raises Differs, OSError."""
    return asyncio.run(_measure(spec, rounds, told, sessions))


async def _measure(
    spec: WorkerSpec, rounds: int, told: Callable[[str], None], sessions: Sequence[int]
) -> list[Row]:
    rows: list[Row] = []
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(private_directory())
        fleets: dict[bool, Fleet] = {}
        for overlap in (True, False):
            orders = msgspec.structs.replace(
                spec, overlap=overlap, socket=str(directory / f"{overlap}.sock"), max_num_seqs=max(sessions)
            )

            async def start(_: int, orders: WorkerSpec = orders) -> WorkerProcess:
                return await WorkerProcess.start(orders)

            fleets[overlap] = Fleet(start, 1)
            await fleets[overlap].start()
            stack.push_async_callback(fleets[overlap].stop, 5.0)
        for count in sessions:
            ran: dict[bool, list[Ran]] = {True: [], False: []}
            for number in range(rounds + 1):
                for half, overlap in ((0, True), (0, False), (1, False), (1, True)):
                    done = await _run(fleets[overlap], count, 2 * number + half)
                    if number:  # the first round warms up
                        ran[overlap].append(done)
                    told(
                        f"{count} turns, {'with' if overlap else 'without'}: {done.step * 1e3:.2f} ms a step"
                    )
                if ran[True] and ran[True][-1].said != ran[False][-1].said:
                    raise Differs(f"{count} turns said something else with overlap than without")
            rows += _rows(count, {overlap: [each.step for each in runs] for overlap, runs in ran.items()})
    return rows


def _rows(count: int, steps: dict[bool, list[float]]) -> list[Row]:
    group = f"a step of {count} turns that decode"
    without = median(steps[False])
    pairs = [off / on for on, off in zip(steps[True], steps[False], strict=True)]
    rows = [
        Row(name, median(steps[on]) * 1e3, "ms", group=group, runs=tuple(t * 1e3 for t in steps[on]))
        for name, on in (("with overlap", True), ("without", False))
    ]
    gain = Row("without / with", median(pairs), "", group=group, runs=tuple(pairs), higher_is_better=True)
    return [*rows, gain, Row("gained", (median(pairs) - 1) * without * 1e3, "ms", group=group)]


async def _run(fleet: Fleet, count: int, number: int) -> Ran:
    marks: list[list[float]] = []
    said: list[list[int]] = []

    async def follow(place: int) -> None:
        history = array("i", [place * SPREAD + number + 1, *(token * 7 % 40_000 for token in range(CONTEXT))])
        sampling = Sampling(temperature=0.0, max_tokens=TOKENS + count, ignore_eos=True)
        name = SessionId(f"bench-{number}-{place}")
        times: list[float] = []
        tokens: list[int] = []
        async for event in fleet.submit(Submit(name, TurnId(1), pack_tokens(history), sampling)):
            if isinstance(event, Token):
                times.append(time.perf_counter())
                tokens.append(event.token)
            elif isinstance(event, TurnEnded) and event.error:
                raise OSError(event.error)
        marks.append(times)
        said.append(tokens)
        fleet.close(name)

    await asyncio.gather(*(follow(place) for place in range(count)))
    began, ended = max(times[0] for times in marks), min(times[-1] for times in marks)
    inside = [mark for mark in marks[0] if began <= mark <= ended]
    return Ran((inside[-1] - inside[0]) / (len(inside) - 1), sorted(said))
