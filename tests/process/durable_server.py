"""The real server, killed at a named point of a turn's way to disk; run as a script.

Arguments: data directory, and a file that arms the points: while it says "before" or "after", the
process kills itself (SIGKILL) before or after the transaction that has a turn in it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from agentserve.config import load
from agentserve.server.launch import run
from agentserve.server.sessions.changes import Change, Put
from agentserve.server.sessions.environment import Table
from agentserve.server.sessions.store import SessionStore
from agentserve.server.wiring import prepare_app


class ArmedStore(SessionStore):
    def __init__(self, folder: Path, armed: Path) -> None:
        super().__init__(folder)
        self._armed = armed

    def write(self, changes: Sequence[Change]) -> None:
        has_turn = any(isinstance(change, Put) and change.table is Table.TURNS for change in changes)
        point = self._armed.read_text() if has_turn else ""
        if point == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        super().write(changes)
        if point == "after":
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    data, armed = sys.argv[1:]
    settings = load(
        {"port": 0, "device_kv": "64MiB", "threads": 1, "log_level": "warning", "data_dir": Path(data)}
    )
    prepare = partial(prepare_app, open_store=lambda folder: ArmedStore(folder, Path(armed)))
    run(settings, prepare, lambda ready: print(f"ready on {ready.url}", flush=True))
