"""The real server, seen from within: `/fuzz/state` tells what it holds and what held its loop up. Run as a
script: the flags of `serve` as JSON, and its configuration file or nothing."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentserve.cli.output import fail
from agentserve.config import ServeConfig, load
from agentserve.heap import resident
from agentserve.server.engine_port import Engine
from agentserve.server.launch import LaunchError, Prepared, run
from agentserve.server.wiring import prepare_app
from tests.prove.fuzz.loop_watch import LoopWatch


def prepare(config: ServeConfig) -> Prepared:
    prepared = prepare_app(config)
    watch = LoopWatch()

    def build(engine: Engine) -> Starlette:
        app = prepared.build(engine)
        assert isinstance(app, Starlette)
        app.router.routes.append(Route("/fuzz/state", state_of(app, watch)))
        asyncio.get_running_loop().call_soon(watch.start)
        return app

    return Prepared(prepared.model, build)


def state_of(app: Starlette, watch: LoopWatch) -> Callable[[Request], Any]:
    async def state(request: Request) -> Response:
        stalls = watch.take()
        context = app.state.context
        names = Counter(name_of(task) for task in asyncio.all_tasks())
        return JSONResponse(
            {
                "stalls": stalls,
                "ticks": watch.ticks,
                "tasks": names,
                "background": len(context.background),
                "fds": len(os.listdir("/proc/self/fd")),
                "threads": threading.active_count(),
                "rss": (whole := resident()),
                "rss_of_files": (mapped := of_files()),
                "own": whole - mapped,
                "blocks": sys.getallocatedblocks(),
            }
        )

    return state


def name_of(task: asyncio.Task[Any]) -> str:
    work = task.get_coro()
    return str(getattr(work, "__qualname__", type(work).__name__))


def of_files() -> int:
    """Bytes of that which are pages of files: of libraries, and of databases."""
    return int(Path("/proc/self/statm").read_text().split()[2]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    flags, file = json.loads(sys.argv[1]), sys.argv[2]
    worker = (sys.executable, str(Path(__file__).with_name("fuzz_worker.py")))
    try:
        run(
            load(flags, Path(file) if file else None),
            prepare,
            lambda ready: print(f"ready on {ready.url}", flush=True),
            worker,
        )
    except LaunchError as failure:
        fail(str(failure))
