"""Notices a worker that is alive and says nothing: a kernel that never returns, a stopped process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from agentserve.server.workers.supervisor import WorkerProcess

log = logging.getLogger(__name__)

LOOKS = 8  # in the time after which a silent worker counts as hung


async def kill_when_hung(worker: WorkerProcess, has_work: Callable[[], bool], seconds: float) -> None:
    """Kill `worker` once it has said nothing for `seconds` while it had work all the time.

    Its death is then seen and mended as any other. Silence is counted in looks, not read from a
    clock: where this process itself was held up (or the machine slept), that is one look, and what the
    worker has said meanwhile is read before the next.
    """
    heard, silent = worker.heard, 0
    while silent < LOOKS:
        await asyncio.sleep(seconds / LOOKS)
        silent = silent + 1 if worker.heard == heard and has_work() else 0
        heard = worker.heard
    log.error(
        "worker process %d has work and said nothing for %g s: killed (if its steps do take so long, "
        "raise --hang-seconds)",
        worker.pid, seconds,
    )  # fmt: skip
    worker.kill()
