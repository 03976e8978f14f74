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

from agentserve.bench.idle_worker import DEVICE
from agentserve.bench.overhead import IDLE_WORKER
from agentserve.bench.report import Row
from agentserve.messages import Submit, Token, TurnEnded, pack_tokens
from agentserve.server.workers.fleet import Fleet
from agentserve.server.workers.spec import WorkerSpec
from agentserve.server.workers.supervisor import WORKER_COMMAND, WorkerProcess, private_directory
from agentserve.types import Sampling, SessionId, TurnId

TURNS = (1, 16)
DEVICE_SECONDS, DEVICE_TURNS = (0.005, 0.015), (64, 256)
CONTEXT, TOKENS = 200, 64
SPREAD = 97  # between the first tokens of prompts, so that none shares a prefix


class Differs(ValueError):
    """A token is not the same with and without."""


@dataclass(frozen=True, slots=True)
class Ran:
    step: float  # seconds
    said: list[list[int]]


@dataclass(frozen=True, slots=True)
class Subject:
    """What is run, and how many turns at a time."""

    name: str
    orders: WorkerSpec
    turns: Sequence[int]
    command: Sequence[str] = WORKER_COMMAND


def subjects(spec: WorkerSpec, turns: Sequence[int]) -> list[Subject]:
    """The model as `spec` has it, and devices that compute by themselves, at a GPU's pace."""
    devices = [
        Subject(
            f"a device that computes for {seconds * 1e3:g} ms",
            msgspec.structs.replace(spec, model=f"{DEVICE}:{seconds}"),
            DEVICE_TURNS,
            IDLE_WORKER,
        )
        for seconds in DEVICE_SECONDS
    ]
    return [Subject(spec.model, spec, turns), *devices]


def measure(measured: Sequence[Subject], rounds: int, told: Callable[[str], None]) -> list[Row]:
    """rounds: of with, without, without, with. Raises Differs, OSError."""
    rows: list[Row] = []
    for subject in measured:
        rows += asyncio.run(_measure(subject, rounds, told))
    return rows


async def _measure(subject: Subject, rounds: int, told: Callable[[str], None]) -> list[Row]:
    rows: list[Row] = []
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(private_directory())
        fleets: dict[bool, Fleet] = {}
        for overlap in (True, False):
            orders = msgspec.structs.replace(
                subject.orders,
                overlap=overlap,
                socket=str(directory / f"{overlap}.sock"),
                max_num_seqs=max(subject.turns),
            )

            async def start(_: int, orders: WorkerSpec = orders) -> WorkerProcess:
                return await WorkerProcess.start(orders, subject.command)

            fleets[overlap] = Fleet(start, 1)
            await fleets[overlap].start()
            stack.push_async_callback(fleets[overlap].stop, 5.0)
        for count in subject.turns:
            rows += await _alternate(fleets, subject.name, count, rounds, told)
    return rows


async def _alternate(
    fleets: dict[bool, Fleet], name: str, count: int, rounds: int, told: Callable[[str], None]
) -> list[Row]:
    steps: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds + 1):  # the first warms up
        said: dict[int, list[list[int]]] = {}
        for half, overlap in ((0, True), (0, False), (1, False), (1, True)):
            done = await _run(fleets[overlap], count, 2 * number + half)
            if number:
                steps[overlap].append(done.step)
            if said.setdefault(half, done.said) != done.said:
                raise Differs(f"{count} turns said something else with overlap than without")
        told(f"{name}, {count} turns: round {number} of {rounds}")
    return _rows(f"{name}, a step of {count} turns that decode", steps)


def _rows(group: str, steps: dict[bool, list[float]]) -> list[Row]:
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
