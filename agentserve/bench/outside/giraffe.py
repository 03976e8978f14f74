"""`giraffe-llm`: fifteen checks of a server by the answers of its model; six of them, in four plans.

Its checks want answers that are exact to the letter, so a small model fails them on every server. The
first plan is the suite as it comes. In the next two the forms of answers are held to by a grammar
(`structured_outputs`, which vLLM has too), in the last a tool has to be called: what passes there and
not in the first is the model's. Which label, name or city it is still has to be found by the model.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentserve.bench.outside.tools import ToolFailed, run
from agentserve.bench.outside.verdicts import Verdict, verdicts

NAME, DISTRIBUTION = "giraffe", "giraffe-llm"
CHECKS = ("access", "serving", "tools", "sessions", "prefix", "cancellation")
SAMPLES, SECONDS = 6, 1800.0
_ENDED = (0, 1, 2)  # statuses that leave a report: pass, fail, inconclusive
_TURNS, _ABORTED = "agentserve_turns_total", 'reason="aborted"'

_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather for a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Delhi", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
_LABELS, _SESSION = ("M2Q8", "K7P4", "W9X1", "R5D6"), "Session_000[0-9]_(fixed|live)"


@dataclass(frozen=True, slots=True)
class Plan:
    name: str
    says: str
    checks: Sequence[str]
    settings: Mapping[str, object] = field(default_factory=dict)  # of giraffe's configuration


@dataclass(frozen=True, slots=True)
class Subject:
    """A server that is checked."""

    name: str  # in results
    url: str
    model: str  # what it calls its model


def _called(name: str, choice: Mapping[str, object], *, calls: bool = True) -> dict[str, object]:
    """A tool check under a rule for calls. Without `calls` none may come."""
    asked = "Use get_weather to check the weather in Delhi." if calls else "Say hello."
    fixture: dict[str, object] = {
        "fixture_id": name,
        "messages": [{"role": "user", "content": asked}],
        "tools": [_TOOL],
        "choice": choice,
    }
    if calls:
        fixture["expected_calls"] = [{"name": "get_weather", "arguments": {"city": "Delhi"}}]
    return fixture


PLANS = (
    Plan("as it comes", "the suite's own requests and answers", CHECKS),
    Plan(
        "names held",
        "the same requests; answers have the form of a session's name",
        ("sessions",),
        {"request_options": {"structured_outputs": {"regex": _SESSION}}},
    ),
    Plan(
        "labels held",
        "the same requests; the answer is one of four labels",
        ("prefix",),
        {"request_options": {"structured_outputs": {"choice": list(_LABELS)}}},
    ),
    Plan(
        "calls forced",
        "the suite's tool with three cities to choose from, named, required, and forbidden",
        ("tools",),
        {
            "tool_checks": {
                "fixtures": [
                    _called("named", {"mode": "named", "name": "get_weather"}),
                    _called("required", {"mode": "required", "parallel_tool_calls": False}),
                    _called("none", {"mode": "none"}, calls=False),
                ]
            }
        },
    ),
)


def configuration(plan: Plan, subject: Subject) -> dict[str, object]:
    """What `giraffe run --config` reads."""
    target = {
        "name": subject.name,
        "url": f"{subject.url}/v1",
        "model": subject.model,
        "metrics_url": f"{subject.url}/metrics",
        "metrics_profile": "vllm-v1",
    }
    return {
        "config_version": 2,
        "targets": [target],
        "checks": list(plan.checks),
        "samples": SAMPLES,
        "retention": "all",
        **plan.settings,
    }


def check(plan: Plan, subject: Subject, environment: Path, folder: Path) -> list[Verdict]:
    """One plan against a server: a verdict for each check. ToolFailed."""
    stem = f"{subject.name}-{plan.name.replace(' ', '-')}"
    settings, there = folder / f"{stem}.json", folder / stem
    settings.write_text(json.dumps(configuration(plan, subject)), encoding="utf-8")
    command = ["giraffe", "run", "--config", str(settings), "--output", str(there), "--output-format", "json"]
    before = aborted(subject.url)
    run(environment, command, folder / f"{stem}.log", SECONDS, ended=_ENDED)
    after = aborted(subject.url)
    ended = None if before is None or after is None else after - before
    path = there / "report.json"
    try:
        return verdicts(json.loads(path.read_bytes()), subject.name, plan.name, plan.checks, ended)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ToolFailed(f"giraffe left no result in {path} ({error!r})") from None


def aborted(url: str) -> int | None:
    """Turns that the server ended before they were whole, by its own count. None: it does not count them
    (vLLM has the name, and leaves it at 0)."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    turns = [line for line in lines if line.startswith(_TURNS)]
    if not turns:
        return None
    return round(sum(float(line.rpartition(" ")[2]) for line in turns if _ABORTED in line))
