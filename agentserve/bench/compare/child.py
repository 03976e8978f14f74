"""A contestant's process: started under a keeper, its output in a log file, never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from agentserve.bench.compare import keeper
from agentserve.bench.compare.contest import PeerFailed

STOP_SECONDS = 15.0  # longer than the keeper's own grace
_TICKS = os.sysconf("SC_CLK_TCK")


class Child:
    """One running command and whatever it starts. `stop` (or the end of the `with`) ends all of it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        logs: Path,
        environment: Mapping[str, str],
        *,
        piped: bool = False,
    ) -> None:
        """Start it. Its output goes to `logs/NAME.log`; if `piped`, stdin and stdout are pipes instead."""
        self.name = name
        self.log = logs / f"{name.replace(' ', '-')}.log"
        inner, self._lifeline = os.pipe()
        try:
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", keeper.__file__, str(inner), *command],
                    stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if piped else log,
                    stderr=log,
                    env=environment,
                    pass_fds=(inner,),
                    start_new_session=True,  # Ctrl-C is for us; we then end the child through its keeper
                )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(inner)

    @property
    def input(self) -> int:
        assert self._process.stdin is not None
        return self._process.stdin.fileno()

    @property
    def output(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    @property
    def keeper(self) -> int:
        """The process that ends it when we end."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def failed(self, what: str, wait: float = 0.0) -> PeerFailed:
        """An error that says what happened, how the process ended if it has (within `wait` seconds), and
        where its output is."""
        try:
            status = self._process.wait(wait)
        except subprocess.TimeoutExpired:
            ending = ""
        else:
            ending = f" (killed by signal {status - 128})" if status > 128 else f" (exit status {status})"
        return PeerFailed(f"{self.name}: {what}{ending}; its output is in {self.log}")

    def cpu_seconds(self) -> float:
        """CPU time of all its processes that still run; 0 where there is no /proc."""
        ticks = 0
        for process in keeper.descendants(self._process.pid):
            try:
                text = Path(f"/proc/{process}/stat").read_text(errors="replace")
            except OSError:
                continue
            user, system = text.rpartition(")")[2].split()[11:13]
            ticks += int(user) + int(system)
        return ticks / _TICKS

    def hold(self, held: bool) -> None:
        """Stop all its processes where they are, or let them go on. Its keeper stays awake, to end them
        when we end."""
        for process in keeper.descendants(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGSTOP if held else signal.SIGCONT)

    def stop(self) -> None:
        """End it and everything it has started; returns when all is gone. May be called twice."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def peer_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours without what would lead a peer's Python to our packages (`kernels` is a common name)."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return kept | dict(extra or {})
