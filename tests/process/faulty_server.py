"""`agentserve serve` whose workers' disk is slow or full on demand; run as a script.

Arguments: the file that says so, beside the folder `data` (`faulty_worker.py`); then pairs of a setting
and its value.
"""

from __future__ import annotations

import sys
from pathlib import Path

from agentserve.config import load
from agentserve.server.launch import run
from agentserve.server.wiring import prepare_app

if __name__ == "__main__":
    armed, *flags = sys.argv[1:]
    pairs = zip(flags[::2], flags[1::2], strict=True)
    settings = load({"port": 0, **{name: value == "true" or value for name, value in pairs}})
    worker = (sys.executable, str(Path(__file__).with_name("faulty_worker.py")), armed)
    run(settings, prepare_app, lambda ready: print(f"ready on {ready.url}", flush=True), worker)
