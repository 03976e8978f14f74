"""The directory of workers' sockets goes with its process, however that ends."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from agentserve.server.workers.supervisor import private_directory

CODE = """
import time
from agentserve.server.workers.supervisor import private_directory
with private_directory() as made:
    print(made, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    short = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(short))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return short


def test_what_a_killed_process_left_is_removed_by_the_next(parent: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        left = Path(process.stdout.readline().strip())
        assert left.parent == parent
        with private_directory() as mine:
            assert left.exists()  # it lives
            process.kill()
            process.wait()
            foreign = parent / "agentserve-of-others"
            foreign.mkdir()
            with private_directory() as other:
                assert not left.exists()
                assert mine.exists()
                assert other.exists()
                assert foreign.exists()  # nobody's lock is in it
        assert not mine.exists()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    foreign.rmdir()
    parent.rmdir()
