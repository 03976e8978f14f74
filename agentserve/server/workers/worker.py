"""The worker's entry point: `python -m agentserve.server.workers.worker`, a WorkerSpec as JSON on stdin.

`build` puts a real model behind the core, `worker_main` runs it to its end. Models run here, in the
worker process, and nowhere in the API process.
"""

from __future__ import annotations

import sys

from agentserve.server.workers.build import build_engine
from agentserve.server.workers.worker_main import main

if __name__ == "__main__":
    sys.exit(main(build_engine))
