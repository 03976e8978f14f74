"""A rank of a tensor-parallel group over a model's folder, and the process that rank 1 is in tests.

`python -m tests.process.group_rank FOLDER MEETING DTYPE MOST_ROWS` follows the plans on its standard input.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import torch

from agentserve.executor.collectives import connect
from agentserve.executor.group import GroupExecutor, NoSampler, follow
from agentserve.executor.runner import TorchExecutor
from agentserve.models.decoder import Decoder
from agentserve.models.load import DTYPES, open_model
from agentserve.models.shard import Shard
from agentserve.models.source import ModelSource
from kernels import ops_for
from tests.parity.harness import CPU, Engine

DEGREE = 2


def engine_of(folder: Path, meeting: Path, dtype: str, rank: int) -> Engine:
    """The engine of one rank, connected to the other one."""
    torch.set_num_threads(1)
    shard = Shard(rank, DEGREE)
    loaded = open_model(ModelSource("folder", folder, "m")).load(DTYPES[dtype], CPU, shard=shard)
    config, ops = shard.config(loaded.config), ops_for(CPU)
    engine = Engine(config, loaded.weights, ops=ops)
    ranks = connect(meeting, rank, DEGREE, CPU)
    engine.decoder = Decoder(config, loaded.weights, ops, 4096, ranks=ranks)
    return engine


@contextmanager
def group(folder: Path, meeting: Path, dtype: str, most_rows: int) -> Iterator[Engine]:
    """Rank 0's engine; rank 1 is a process."""
    command = [sys.executable, "-m", "tests.process.group_rank", str(folder), str(meeting), dtype]
    command.append(str(most_rows))
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        assert process.stdin is not None
        engine = engine_of(folder, meeting, dtype, rank=0)
        own = TorchExecutor(engine.decoder, engine.pool, engine.spy, most_rows)
        engine.executor = GroupExecutor(own, [cast(BinaryIO, process.stdin)])  # type: ignore[assignment]
        yield engine
        process.stdin.close()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    other = engine_of(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], rank=1)
    follow(TorchExecutor(other.decoder, other.pool, NoSampler(), int(sys.argv[4])), sys.stdin.buffer)
