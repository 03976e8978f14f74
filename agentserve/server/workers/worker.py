"""The worker's entry point: `python -m agentserve.server.workers.worker`, a WorkerSpec as JSON on stdin.

`build` puts a real model behind the core, `worker_main` runs it to its end. Models run here, in the
worker process, and nowhere in the API process.
"""

from __future__ import annotations

import sys
from functools import partial

from agentserve.executor.matcher_process import fork_host
from agentserve.server.workers.build import build_engine
from agentserve.server.workers.worker_main import main

if __name__ == "__main__":
    # First of all: a process is forked safely while it has one thread, and no device.
    sys.exit(main(partial(build_engine, matchers=fork_host())))
