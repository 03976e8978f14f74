"""The points at which a process of the server can be made to kill itself, and how one is armed.

An order is one line in a file: its number, the point, and at which passing of it. Whoever gets there
writes down that it was there, takes the order back, and is gone (SIGKILL: no handler, no flush).
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SERVER, WORKER = "server", "worker"


@dataclass(frozen=True)
class Point:
    name: str
    process: str
    most: int = 1  # passings of it that a life is sure to have, soon
    start: bool = False  # it is passed while its process starts


def _points(process: str, most: int, *names: str, start: bool = False) -> Iterator[Point]:
    return (Point(name, process, most, start) for name in names)


POINTS: tuple[Point, ...] = (
    # commit: the sessions' transactions, by what is in them, and what follows one.
    *_points(SERVER, 5, "commit.turn.before", "commit.turn.inside", "commit.turn.after"),
    *_points(SERVER, 2, "commit.together.inside"),  # several turns that ended together
    *_points(SERVER, 6, "commit.number.before", "commit.number.after"),  # of a turn that begins
    *_points(SERVER, 2, "commit.result.before", "commit.result.after"),  # one of several calls'
    *_points(SERVER, 2, "commit.fork.before", "commit.fork.inside", "commit.fork.after"),
    *_points(SERVER, 2, "commit.close.before", "commit.close.after"),
    *_points(SERVER, 5, "commit.untold"),  # on disk and in memory, and no client has heard of it
    *_points(SERVER, 2, "fork.untold"),
    *_points(SERVER, 1, "resume.before", "resume.inside", "resume.read", start=True),
    # plan: from a turn's submission to its tokens' delivery.
    *_points(SERVER, 6, "turn.submitted", "turn.ended"),
    *_points(SERVER, 60, "token.received"),  # from the worker, and on no client's way yet
    *_points(WORKER, 6, "plan.submitted", "plan.parked"),
    *_points(WORKER, 60, "plan.before", "plan.ran", "plan.finished", "token.unsent"),
    *_points(WORKER, 2, "plan.forked"),
    *_points(WORKER, 3, "plan.restored"),
    # copy: transfers between tiers.
    *_points(WORKER, 6, "save.before", "save.done", "write.before", "write.done"),
    *_points(WORKER, 3, "load.before", "load.done", "fetch.before", "fetch.done"),
    *_points(WORKER, 2, "drop.before", "drop.done"),
    *_points(WORKER, 30, "host.copy", "disk.payload"),
    *_points(WORKER, 4, "disk.commit", "disk.read"),
    *_points(WORKER, 1, "disk.adopt", "start.ready", start=True),
)
BY_NAME = {point.name: point for point in POINTS}


def rounds(kills: int, seed: int, points: Sequence[Point] = POINTS) -> list[Point]:
    """So many of the points, each as often as the others, give or take one; processes take turns, for a
    worker that dies again and again is given up."""
    drawn = random.Random(seed)
    ours: dict[str, list[Point]] = {
        process: [point for point in points if point.process == process] for process in (SERVER, WORKER)
    }
    whole, more = divmod(kills, len(points))
    extra = drawn.sample(list(points), more)
    lines = []
    for process, some in ours.items():
        line = [point for _ in range(whole) for point in drawn.sample(some, len(some))]
        lines.append(line + [point for point in extra if point.process == process])
    return [point for pair in itertools.zip_longest(*lines) for point in pair if point is not None]


class Trap:
    """One process's view of the orders. Any thread may pass a point."""

    def __init__(self, orders: Path, hits: Path) -> None:
        self._orders = orders
        self._hits = hits
        self._lock = threading.Lock()
        self._order = ""
        self._passed = 0

    def armed(self, point: str) -> bool:
        return self._read()[1:2] == [point]

    def at(self, point: str, linger: float = 0.0) -> None:
        """Dies here if that was ordered. linger: seconds that the other threads still have: whatever does
        not wait for this one is said meanwhile."""
        with self._lock:
            words = self._read()
            if words[1:2] != [point]:
                return
            order, _, nth = words
            if order != self._order:
                self._order, self._passed = order, 0
            self._passed += 1
            if self._passed == int(nth):
                time.sleep(linger)
                self._die(f"{order} {point} {nth}\n")

    def _read(self) -> list[str]:
        return self._orders.read_text().split()

    def _die(self, line: str) -> None:
        handle = os.open(self._hits, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(handle, line.encode())
        self._orders.write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
