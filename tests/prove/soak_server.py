"""The real launcher, fleet and HTTP application around soak_worker's; run as a script: workers, page size."""

from __future__ import annotations

import sys
from pathlib import Path

from agentserve.config import ServeConfig, load
from agentserve.server.launch import Prepared, run
from tests.api_rig import Rig


def prepare(config: ServeConfig) -> Prepared:
    return Prepared("tiny", lambda engine: Rig(engine, aliases=("smollm2-135m",)).app)  # type: ignore[arg-type]


if __name__ == "__main__":
    workers, page_size = sys.argv[1:]
    settings = load({"port": 0, "workers": workers, "page_size": page_size, "log_level": "error"})
    worker = (sys.executable, str(Path(__file__).with_name("soak_worker.py")))
    run(settings, prepare, lambda ready: print(f"ready on {ready.url}", flush=True), worker)
