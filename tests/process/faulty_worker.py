"""The real worker over a disk that is slow or full while a file says so; run as a script.

Argument: that file. While it says "slow" nothing is read from disk or committed there: whoever tries
waits until the file says otherwise. While it says "full" the system lets no file grow beyond the size
that the blocks' file had when that began.
"""

from __future__ import annotations

import resource
import sys
import time
from functools import partial
from pathlib import Path

from agentserve.server.workers.build import build_engine
from agentserve.server.workers.worker_main import main
from tiering.stores.buffers import Bytes
from tiering.stores.faults import DISK_COMMIT, DISK_MAP, DISK_READ


class Disk:
    """The faults of one worker's disk."""

    def __init__(self, armed: Path) -> None:
        self._armed = armed
        self._full = False

    def __call__(self, point: str, data: Bytes | None) -> None:
        if point in (DISK_READ, DISK_COMMIT):
            while self._armed.read_text() == "slow":
                time.sleep(0.01)
        if point == DISK_MAP:
            self._limit(full=self._armed.read_text() == "full")

    def _limit(self, full: bool) -> None:
        if full == self._full:
            return
        self._full = full
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        files = self._armed.parent.glob("data/kv/worker-*/data.mdb")
        size = max((file.stat().st_size for file in files), default=0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size if full else most, most))


if __name__ == "__main__":
    sys.exit(main(partial(build_engine, fault=Disk(Path(sys.argv[1])))))
