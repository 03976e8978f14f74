"""The real launcher around the made-up worker and a three-route app; run as a script.

Arguments: port, drain seconds, marker file, and optionally an error for the worker to fail with
(`abort`: then there is a disk for KV).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentserve.cli.output import fail
from agentserve.config import ServeConfig, load
from agentserve.messages import Submit, Token, pack_tokens
from agentserve.server.engine_port import Engine
from agentserve.server.launch import LaunchError, Prepared, run
from agentserve.types import Sampling, SessionId, TurnId


def prepare(config: ServeConfig) -> Prepared:
    return Prepared("made-up", app)


def app(engine: Engine) -> Starlette:
    async def health(request: Request) -> Response:
        return JSONResponse({"alive": engine.alive, "pid": engine.hello.pid})

    async def generate(request: Request) -> Response:
        session, turn = SessionId(request.path_params["session"]), TurnId(1)
        sampling = Sampling(max_tokens=int(request.path_params["count"]))
        stream = engine.submit(Submit(session, turn, pack_tokens(array("i", [5, 6, 7])), sampling))

        async def lines() -> AsyncIterator[str]:
            try:
                async for event in stream:
                    yield f"{event.token}\n" if isinstance(event, Token) else f"# {event}\n"
            finally:
                engine.abort(session, turn)

        return StreamingResponse(lines())

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        print("lifespan ended", flush=True)

    routes = [Route("/health", health), Route("/generate/{session}/{count}", generate)]
    return Starlette(routes=routes, lifespan=lifespan)


if __name__ == "__main__":
    port, drain, marker, *error = sys.argv[1:]
    flags: dict[str, object] = {"port": port, "drain_seconds": drain}
    if error == ["abort"]:
        flags |= {"data_dir": marker + "-data", "host_kv": "1MiB", "disk_kv": "1MiB"}
    worker = (sys.executable, str(Path(__file__).with_name("fake_worker.py")), marker, *error)
    try:
        run(
            load(flags),
            prepare,
            lambda ready: print(ready.url, flush=True),
            worker,
        )
    except LaunchError as failure:
        fail(str(failure))
