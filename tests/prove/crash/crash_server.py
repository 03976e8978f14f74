"""The real server, which kills itself where it is ordered to; run as a script.

Arguments: a folder with the orders, and the flags of `serve` as JSON. Standing in the way are a store
and an engine that do what the real ones do, and look at the orders before, in between and after.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lmdb
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentserve.cli.output import fail
from agentserve.config import ServeConfig, load
from agentserve.messages import Park, Submit, Token, TurnEnded
from agentserve.server.engine_port import Engine, TurnEvent, TurnStream
from agentserve.server.launch import LaunchError, Prepared, run
from agentserve.server.sessions.changes import Change, Forget, Put
from agentserve.server.sessions.environment import Table
from agentserve.server.sessions.store import SessionStore, Stored
from agentserve.server.wiring import prepare_app
from agentserve.types import SessionId
from tests.prove.crash.points import Trap

GATHERING = 0.05  # seconds that a transaction takes while turns are to end together
LINGER = 0.1  # seconds that one takes that will never be


class ArmedStore(SessionStore):
    def __init__(self, folder: Path, trap: Trap) -> None:
        self._trap = trap
        self._kinds: list[str] = []  # of the transaction that is being written
        trap.at("resume.before")
        super().__init__(folder, self._opened)

    def _opened(self, path: str, **options: Any) -> ArmedEnvironment:
        env = ArmedEnvironment(lmdb.open(path, **options), self._passed)
        self._trap.at("resume.inside")
        return env

    def read(self, *, words: bool = True) -> dict[bytes, Stored]:
        found = super().read(words=words)
        self._trap.at("resume.read")
        return found

    def write(self, changes: Sequence[Change]) -> None:
        if self._trap.armed("commit.together.inside"):
            time.sleep(GATHERING)  # a slow disk: meanwhile turns end, and share the next transaction
        self._kinds = kinds_of(changes)
        self._passed("before")
        super().write(changes)
        self._passed("after")
        self._kinds = []

    def _passed(self, where: str) -> None:
        for kind in self._kinds:
            self._trap.at(f"commit.{kind}.{where}", 0.0 if where == "after" else LINGER)


class ArmedEnvironment:
    """An LMDB environment; before it commits somebody is told."""

    def __init__(self, env: Any, passed: Callable[[str], None]) -> None:
        self._env = env
        self._passed = passed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    @contextmanager
    def begin(self, *args: Any, **options: Any) -> Iterator[Any]:
        with self._env.begin(*args, **options) as txn:
            yield txn
            if options.get("write"):
                self._passed("inside")


def kinds_of(changes: Sequence[Change]) -> list[str]:
    """What a transaction is about: some of turn, together, fork, close, result, number."""
    turns = [change for change in changes if isinstance(change, Put) and change.table is Table.TURNS]
    numbers = [int.from_bytes(turn.name.partition(b"\0")[2], "big") for turn in turns]
    kinds = {
        "turn": any(numbers),
        "together": sum(map(bool, numbers)) > 1,
        "fork": 0 in numbers,
        "close": any(isinstance(change, Forget) for change in changes),
    }
    found = [kind for kind, there in kinds.items() if there]
    if not found:
        tables = {change.table for change in changes if isinstance(change, Put)}
        found = ["result"] if Table.WORDS in tables else ["number"] if Table.HEADS in tables else []
    return found


class ArmedEngine:
    """A fleet whose events are looked at on their way."""

    def __init__(self, engine: Engine, trap: Trap) -> None:
        self._engine = engine
        self._trap = trap

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, command: Submit) -> AsyncIterator[TurnEvent]:
        stream = self._engine.submit(command)
        self._trap.at("turn.submitted")
        return self._watched(stream)

    async def _watched(self, stream: TurnStream) -> AsyncIterator[TurnEvent]:
        async for event in stream:
            if isinstance(event, Token):
                self._trap.at("token.received")
            elif isinstance(event, TurnEnded):
                self._trap.at("turn.ended")
            yield event

    def park(self, command: Park) -> None:
        self._engine.park(command)
        self._trap.at("commit.untold")

    def fork(self, session: SessionId, child: SessionId, length: int) -> None:
        self._engine.fork(session, child, length)
        self._trap.at("fork.untold")


def prepare(config: ServeConfig, trap: Trap) -> Prepared:
    prepared = prepare_app(config, open_store=partial(ArmedStore, trap=trap))

    def build(engine: Engine) -> Starlette:
        app = prepared.build(ArmedEngine(engine, trap))  # type: ignore[arg-type]
        assert isinstance(app, Starlette)
        app.router.routes.append(Route("/tasks", tasks_of(app)))
        return app

    return Prepared(prepared.model, build)


def tasks_of(app: Starlette) -> Callable[[Request], Any]:
    """What no client's request accounts for: turns without a reader, and all tasks of the loop."""

    async def tasks(request: Request) -> Response:
        names = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]  # type: ignore[union-attr]
        return JSONResponse({"background": len(app.state.context.background), "tasks": sorted(names)})

    return tasks


if __name__ == "__main__":
    folder, flags = Path(sys.argv[1]), json.loads(sys.argv[2])
    trap = Trap(folder / "orders", folder / "hits")
    worker = (sys.executable, str(Path(__file__).with_name("crash_worker.py")), str(folder))
    try:
        run(
            load(flags),
            lambda config: prepare(config, trap),
            lambda ready: print(f"ready on {ready.url}", flush=True),
            worker,
        )
    except LaunchError as failure:
        fail(str(failure))
