"""NVIDIA's aiperf in its agentic replay: recorded sessions of coding agents, each entered at some turn.

Recordings are JSON files of what was sent when, in blocks of tokens that have numbers; aiperf makes up a
text for each block, the same wherever its number stands, so later requests begin as earlier ones do. It
takes sessions again from the start until its time is over.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from agentserve.bench.outside.tools import Came, Load, Replay, ToolFailed

_BLOCK = 64  # tokens
_ANSWERED = 0.5  # seconds that each request took, as recorded
_LONGEST = 3.0  # seconds of a wait
_HIT, _POSSIBLE = "overall_usage_prompt_cache_read_pct", "theoretical_prefix_cache_hit"

Recording = dict[str, object]


class Aiperf:
    name = "aiperf"
    distribution = "aiperf"
    replays: Sequence[Replay] = (
        Replay("chat", True),
        Replay("chat", False),
        Replay("messages", True),
        Replay("messages", False),
        Replay("responses", True),
        Replay("responses", False),
    )

    def __init__(self) -> None:
        self._tokenizer = Path()

    def prepare(self, load: Load, tokenizer: Path, folder: Path) -> None:
        self._tokenizer = tokenizer
        traces = folder / "traces"
        traces.mkdir(exist_ok=True)
        rng = random.Random(load.seed)
        for number in range(load.agents):
            written = json.dumps(recording(rng, load, number))
            (traces / f"agent-{number}.json").write_text(written, encoding="utf-8")

    def command(self, replay: Replay, load: Load, url: str, folder: Path) -> Sequence[str]:
        flags = {
            "model": load.model,
            "url": url,
            "endpoint-type": replay.api,
            "scenario": "inferencex-agentx-mvp",  # what selects the agentic replay; its corpus cannot be had
            "custom-dataset-type": "weka-trace",
            "input-file": folder / "traces",
            "concurrency": load.lanes,
            "benchmark-duration": f"{load.seconds:.0f}",
            "tokenizer": self._tokenizer,
            "extra-inputs": "ignore_eos:true",
            "session-header": "X-Session-ID",
            "random-seed": load.seed,
            "ui": "none",
            "artifact-dir": _artifacts(replay, folder),
        }
        command = ["aiperf", "profile", "--unsafe-override", "--use-server-token-count"]
        for name, value in flags.items():
            command += [f"--{name}", str(value)]
        return [*command, "--streaming"] if replay.streams else command

    def read(self, replay: Replay, load: Load, folder: Path) -> Came:
        path = _artifacts(replay, folder) / "profile_export_aiperf.json"
        try:
            found = json.loads(path.read_bytes())
            good = round(found["request_count"]["avg"])
            sent = round(found["completed_request_count"]["avg"])
            whole = float(found["request_latency"]["p50"])
            first = float(found["time_to_first_token"]["p50"]) if replay.streams else None
            cut = found["was_cancelled"] or not found["is_complete"] or bool(found["error_summary"])
            version = str(found["aiperf_version"])
            hit, possible = (_average(found, name) for name in (_HIT, _POSSIBLE))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ToolFailed(f"aiperf left no result in {path} ({error!r})") from None
        return Came(sent, max(sent - good, int(cut)), first, whole, version, hit, possible)


def _average(found: Recording, name: str) -> float | None:
    metric = found.get(name)
    return float(metric["avg"]) if isinstance(metric, dict) else None


def recording(rng: random.Random, load: Load, number: int) -> Recording:
    """One agent: each request is the one before, what was answered, and a tool's result."""
    fresh = count(number * 1_000_000)
    size, at = rng.randrange(600, 1000), 0.0
    blocks: list[int] = []
    requests: list[Recording] = []
    for turn in range(load.turns):
        last = turn == load.turns - 1
        wait = round(min(rng.expovariate(1 / load.wait), _LONGEST), 2) if turn and load.wait else 0.0
        at += wait
        blocks += [next(fresh) for _ in range(size // _BLOCK - len(blocks))]
        requests.append(
            {
                "t": round(at, 3),
                "type": "s",
                "model": "recorded",
                "in": size,
                "out": load.output,
                "hash_ids": list(blocks),
                "input_types": ["tool_result" if turn else "text"],
                "output_types": ["text" if last else "tool_use"],
                "stop": "end_turn" if last else "tool_use",
                "api_time": _ANSWERED,
                "think_time": wait,
            }
        )
        at += _ANSWERED
        size += load.output + rng.randrange(100, 250)
    return {
        "id": f"agent-{number}",
        "models": ["recorded"],
        "block_size": _BLOCK,
        "hash_id_scope": "local",
        "system_tokens": 256,
        "requests": requests,
    }


def _artifacts(replay: Replay, folder: Path) -> Path:
    return folder / f"aiperf-{replay.api}-{'streamed' if replay.streams else 'whole'}"
