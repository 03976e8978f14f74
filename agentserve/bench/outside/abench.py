"""AlibabaResearch's abench (`agentic-bench` on PyPI): sessions in a closed loop, with tools that wait."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from agentserve.bench.outside.tools import Came, Load, Replay, ToolFailed

_SYSTEM = 512  # tokens that all sessions begin with
_MORE = 200  # tokens of each tool result


class Abench:
    name = "abench"
    distribution = "agentic-bench"
    replays: Sequence[Replay] = (Replay("chat", True), Replay("chat", False))

    def prepare(self, load: Load, tokenizer: Path, folder: Path) -> None:
        """It draws its sessions itself."""

    def command(self, replay: Replay, load: Load, url: str, folder: Path) -> Sequence[str]:
        flags = {
            "base-url": url,
            "model": load.model,
            "dataset-name": "random",
            "system-prompt-len": _SYSTEM,
            "min-context": 0,
            "turns": load.turns,
            "input-increment": _MORE,
            "output-len": load.output,
            "num-sessions": load.agents,
            "max-concurrency": load.lanes,
            "gap-policy": f"exponential:{load.wait * 1000:.0f}",
            "seed": load.seed,
            "output-file": _file(replay, folder),
        }
        command = ["abench", "run", "--flush-cache", "--disable-tqdm"]
        for name, value in flags.items():
            command += [f"--{name}", str(value)]
        return command if replay.streams else [*command, "--disable-stream"]

    def read(self, replay: Replay, load: Load, folder: Path) -> Came:
        path = _file(replay, folder)
        try:
            found = json.loads(path.read_bytes().splitlines()[-1])
            sessions = found["sessions"]
            turns = [turn for session in sessions for turn in session["turns"]]
            good = [turn for turn in turns if turn["success"]]
            first = median(turn["ttft"] for turn in good) * 1000
            whole = median(turn["latency"] for turn in good) * 1000
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ToolFailed(f"abench left no result in {path} ({error!r})") from None
        wanted = load.agents * load.turns
        return Came(wanted, wanted - len(good), first if replay.streams else None, whole)


def _file(replay: Replay, folder: Path) -> Path:
    return folder / f"abench-{replay.api}-{'streamed' if replay.streams else 'whole'}.jsonl"
