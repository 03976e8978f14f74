"""loop.py NAME: does the work that stdin asks for, a JSON object a line, with the engine of NAME_driver.py.

First come the orders, {"model": FILE, "threads": N, ...}: load it. The answer is
{"kind": "ready", "version": TEXT, "settings": {...}}. Then any number of
{"kind": "prefill", "prompts": [[ID, ...], ...]} and {"kind": "decode", "prompts": ..., "steps": N},
each answered by {"kind": "seconds", "seconds": [...]}: to the first token of all prompts, or of each step
in which every prompt gets one token. What goes wrong is {"kind": "failed", "error": LINE}, and the end.
The standard library alone.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

Prompts = list[list[int]]


class Engine(Protocol):
    """An engine with its model loaded. Every call starts with no KV of earlier ones."""

    version: str
    settings: dict[str, Any]

    def prefill(self, prompts: Prompts) -> float:
        """Seconds from the prompts to the first token of all of them."""
        ...

    def decode(self, prompts: Prompts, steps: int) -> list[float]:
        """Seconds of `steps` steps after the prefill; each gives one token to every prompt."""
        ...


Build = Callable[[dict[str, Any]], Engine]


def serve(build: Build) -> int:
    """Answer until stdin ends. Whatever libraries print goes to stderr: stdout belongs to the answers."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(kind: str, **fields: object) -> None:
        answers.write(json.dumps({"kind": kind, **fields}) + "\n")
        answers.flush()

    try:
        engine = build(json.loads(sys.stdin.readline()))
        answer("ready", version=engine.version, settings=engine.settings)
        for line in sys.stdin:
            work = json.loads(line)
            if work["kind"] == "prefill":
                seconds = [engine.prefill(work["prompts"])]
            else:
                seconds = engine.decode(work["prompts"], work["steps"])
            answer("seconds", seconds=seconds)
    except Exception as error:
        answer("failed", error=" ".join(f"{type(error).__name__}: {error}".split()))
        raise
    return 0


if __name__ == "__main__":
    script = Path(__file__).with_name(f"{sys.argv[1]}_driver.py")
    sys.exit(serve(runpy.run_path(str(script))["build"]))
