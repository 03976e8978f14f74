"""What the command was asked for, and what of a peers' folder is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentserve.bench.compare.contest import PeerFailed


@dataclass(frozen=True, slots=True)
class Settings:
    """`flags` are ours, as `agentserve serve` takes them: only those that were given."""

    peers: Path
    model: Path | None  # None: the one that the peers' folder holds
    flags: Mapping[str, str]
    kv_gib: int
    threads: int
    start_limit: float  # seconds
    run_limit: float  # seconds

    def model_or(self, path: str) -> str:
        """The chosen model's path, else that of `path` inside the peers' folder. Raises PeerFailed."""
        if self.model is None:
            return str(self.needed(path))
        if not self.model.exists():
            raise PeerFailed(f"--model {self.model}: no such file or folder")
        return str(self.model.absolute())

    def needed(self, path: str) -> Path:
        """`path` inside the peers' folder. Raises PeerFailed if it is not there."""
        found = self.peers / path
        if not found.exists():
            raise PeerFailed(f"{found}: not there; --peers-dir names the folder that the peer was set up in")
        return found
