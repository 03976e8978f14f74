"""What the load generators have in common: what a replay is asked for, and what came of it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

SHOWN = 12  # lines of a tool's output, where it failed


class ToolFailed(Exception):
    """The tool is not there, or ended without a result. One line, and the name of its log."""


@dataclass(frozen=True, slots=True)
class Replay:
    """One run of a tool."""

    api: str  # "chat", "messages", "responses"
    streams: bool

    @property
    def name(self) -> str:
        return f"{self.api}, {'streamed' if self.streams else 'whole'}"


@dataclass(frozen=True, slots=True)
class Load:
    """What is replayed. Times in seconds, sizes in tokens."""

    model: str
    agents: int  # sessions
    lanes: int  # of them at once
    turns: int  # of each
    output: int  # of each turn
    wait: float  # mean of a tool
    seconds: float  # where the tool repeats sessions until its time is over
    seed: int


@dataclass(frozen=True, slots=True)
class Came:
    """What the tool says of one run."""

    requests: int  # that were sent
    failed: int  # or cut, or not sent because an earlier one failed
    first_ms: float | None  # median time to the first token; None: replies came whole
    whole_ms: float  # median time of a request
    version: str = ""
    found: float | None = None  # prompt tokens that were not computed, in percent, by the tool's own count
    findable: float | None = None  # the same where nothing that was there before is computed again


class Tool(Protocol):
    """A load generator; `folder` is where it may write."""

    name: str
    distribution: str
    replays: Sequence[Replay]

    def prepare(self, load: Load, tokenizer: Path, folder: Path) -> None: ...

    def command(self, replay: Replay, load: Load, url: str, folder: Path) -> Sequence[str]:
        """Behind the environment's `bin`."""

    def read(self, replay: Replay, load: Load, folder: Path) -> Came: ...


def run(
    environment: Path, command: Sequence[str], log: Path, limit: float, *, ended: Sequence[int] = (0,)
) -> None:
    """Run a tool's command to its end, its output in `log`. ToolFailed, also at a status that is not in
    `ended`."""
    program = environment / "bin" / command[0]
    if not program.exists():
        raise ToolFailed(f"{program}: not there; `make outside` sets the environment up")
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                [program, *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(os.environ),
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ToolFailed(f"{command[0]} took longer than {limit:.0f} s; see {log}") from None
    if done.returncode not in ended:
        said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-SHOWN:]
        raise ToolFailed(f"{command[0]} ended with status {done.returncode}; see {log}: {' | '.join(said)}")


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    """Without what would let it import our packages; and told to be offline, aiperf takes a tokenizer's
    folder for a name on a hub."""
    left_out = ("PYTHONPATH", "VIRTUAL_ENV", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return {name: value for name, value in ours.items() if name not in left_out}
