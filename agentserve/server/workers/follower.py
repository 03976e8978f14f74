"""A follower's entry point: `python -m agentserve.server.workers.follower`, started by its worker (rank 0).

Orders and plans come through its standard input, answers leave through its standard output.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import BinaryIO

from agentserve.executor.collectives import connect
from agentserve.executor.group import NoSampler, follow, read_frame
from agentserve.executor.runner import TorchExecutor
from agentserve.heap import freeze
from agentserve.server.workers.build_rank import open_rank
from agentserve.server.workers.followers import (
    Begin,
    CannotFollow,
    Following,
    Loaded,
    Orders,
    receive_order,
    send,
)
from agentserve.server.workers.parent import die_with

log = logging.getLogger("agentserve.worker")


def main() -> int:
    """Follow one leader to its end; the exit status."""
    plans, answers = sys.stdin.buffer, _answers()
    orders = receive_order(plans)
    if not isinstance(orders, Orders):
        return 1
    die_with(orders.leader)
    spec = orders.spec
    logging.basicConfig(
        level=spec.log_level.upper(),
        format=f"%(asctime)s worker {spec.index} rank {orders.rank} %(levelname)s %(message)s",
    )
    try:
        executor = _executor(orders, plans, answers)
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        log.debug("this rank cannot be built", exc_info=True)
        send(answers, CannotFollow(_one_line(orders.rank, error)))
        read_frame(plans)  # the leader ends this rank when it has said why
        return 1
    if executor is None:
        return 0
    send(answers, Following())
    freeze()
    follow(executor, plans)
    return 0


def _executor(orders: Orders, plans: BinaryIO, answers: BinaryIO) -> TorchExecutor | None:
    """None: the leader is gone."""
    rank = open_rank(orders.spec, orders.rank)
    loaded = rank.load()
    send(answers, Loaded(loaded.digest, rank.pages(loaded.weights.nbytes_in_blocks), loaded.weights.nbytes))
    begin = receive_order(plans)
    if not isinstance(begin, Begin):
        return None
    try:
        ranks = connect(Path(orders.meeting), orders.rank, orders.spec.tensor_parallel, rank.device)
    except Exception:  # the leader waits for this rank and reads nothing: that it ends is the word
        log.exception("this rank does not find the others")
        raise SystemExit(1) from None
    return rank.executor(loaded, begin.pages, NoSampler(), ranks)


def _answers() -> BinaryIO:
    """Standard output for answers alone: whatever a library prints goes where the log goes."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def _one_line(rank: int, error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return f"rank {rank}: {text}"


if __name__ == "__main__":
    sys.exit(main())
