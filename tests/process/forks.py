"""Processes that are forked from one that has imported what they run: they start in milliseconds, and are
killed as any other."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_RUN = [f"tests.process.{name}" for name in ("hooks_server", "webhook_receiver", "webhook_sender")]


class Fork:
    """`main(say, …)` in a process of its own, and the lines that it says. A line is heard whole or not at
    all, whenever it is killed."""

    def __init__(self, main: Callable[..., None], *args: Any) -> None:
        _CONTEXT.set_forkserver_preload(_RUN)
        self._lines, said = _CONTEXT.Pipe(duplex=False)
        self.process = _CONTEXT.Process(target=_main, args=(main, said, *args), daemon=True)
        self.process.start()
        said.close()

    def line(self, patience: float = 60.0) -> str:
        assert self._lines.poll(patience), "it says nothing"
        return self._lines.recv_bytes().decode()

    def lines(self) -> Iterator[str]:
        """To its end."""
        while True:
            try:
                yield self._lines.recv_bytes().decode()
            except EOFError:
                return

    def wait(self, patience: float = 60.0) -> int:
        """How it ended."""
        self.process.join(patience)
        assert self.process.exitcode is not None, "it does not end"
        return self.process.exitcode

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.wait()

    def close(self) -> None:
        self.kill()
        self._lines.close()
        self.process.close()


def _main(main: Callable[..., None], said: Connection, *args: Any) -> None:
    main(lambda line: said.send_bytes(line.encode()), *args)
