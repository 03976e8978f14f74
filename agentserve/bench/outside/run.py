"""All replays of a tool against one server, one after the other."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentserve.bench.outside.abench import Abench
from agentserve.bench.outside.aiperf import Aiperf
from agentserve.bench.outside.tools import Came, Load, Replay, Tool, run
from agentserve.bench.report import Row

LIMIT = 600.0  # seconds that one run of a tool may take
BY_THE_TOOL = "… by the tool's count, without what warms up"
_PROMPT, _FOUND = "vllm:prompt_tokens_total", "vllm:prompt_tokens_cached_total"


def tools() -> Mapping[str, Callable[[], Tool]]:
    return {"abench": Abench, "aiperf": Aiperf}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tool runs: its Python environment, a server, a tokenizer, and a folder to write into."""

    environment: Path
    url: str
    tokenizer: Path
    folder: Path


def replay_all(tool: Tool, load: Load, place: Place, say: Callable[[str], None]) -> tuple[list[Row], str]:
    """The rows of every replay, and the tool's version. ToolFailed where a run has no result; that requests
    failed is a row."""
    folder, url = place.folder, place.url
    tool.prepare(load, place.tokenizer, folder)
    rows: list[Row] = []
    for replay in tool.replays:
        say(f"{tool.name}: {replay.name} ...")
        before = _counters(url)
        log = folder / f"{tool.name}-{replay.name.replace(', ', '-')}.log"
        run(place.environment, tool.command(replay, load, url, folder), log, LIMIT)
        came, after = tool.read(replay, load, folder), _counters(url)
        prompt, found = (after[name] - before[name] for name in (_PROMPT, _FOUND))
        rows += _rows(replay, came, prompt, found)
    return rows, version(place.environment, tool.distribution)


def failed(rows: Sequence[Row]) -> bool:
    return any(row.value for row in rows if row.name == "failed") or any(
        not row.value for row in rows if row.name == "requests"
    )


def version(environment: Path, distribution: str) -> str:
    """Of what is installed in another environment."""
    stem = distribution.replace("-", "_")
    found = sorted(environment.glob(f"lib/python*/site-packages/{stem}-*.dist-info"))
    return found[-1].name.removeprefix(f"{stem}-").removesuffix(".dist-info") if found else "unknown"


def _rows(replay: Replay, came: Came, prompt: float, found: float) -> list[Row]:
    def row(name: str, value: float, unit: str, *, asked: str = "", higher: bool = False) -> Row:
        return Row(name, value, unit, group=replay.name, asked=asked, higher_is_better=higher)

    rows = [
        row("requests", came.requests, ""),
        row("failed", came.failed, "", asked="none"),
        row("prompt tokens, with what warms up", prompt / 1000, "K"),
        row("of them not computed", 100 * found / prompt if prompt else 0.0, "%", higher=True),
    ]
    if came.found is not None:
        rows.append(
            Row(
                BY_THE_TOOL,
                came.found,
                "%",
                limit=came.findable,
                limit_name="what the sessions have in common",
                higher_is_better=True,
                group=replay.name,
            )
        )
    if came.first_ms is not None:
        rows.append(row("first token, P50", came.first_ms, "ms"))
    return [*rows, row("whole request, P50", came.whole_ms, "ms")]


def _counters(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    sums = dict.fromkeys((_PROMPT, _FOUND), 0.0)
    for line in lines:
        name = line.partition("{")[0]
        if name in sums:
            sums[name] += float(line.rpartition(" ")[2])
    return sums
