"""The API process around the paced worker; run as a module. Arguments: the model whose text is used, the
worker's arguments. Its first line is its URL."""

from __future__ import annotations

import sys

from agentserve.config import load
from agentserve.server.launch import run
from agentserve.server.wiring import prepare_app

if __name__ == "__main__":
    model, *arguments = sys.argv[1:]
    settings = load({"port": 0, "model": model, "max_num_seqs": 256, "log_level": "warning"})
    worker = (sys.executable, "-P", "-m", "agentserve.bench.frontend.worker", *arguments)
    run(settings, prepare_app, lambda ready: print(ready.url, flush=True), worker)  # noqa: T201
