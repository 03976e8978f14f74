"""A contestant behind JSON lines: a line of work in, a line of answer out, as `drivers/loop.py` says."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Mapping

import msgspec

from agentserve.bench.compare.child import Child
from agentserve.bench.compare.plan import UNSTEADY, WARM_UP, Scenario, token_prompts
from agentserve.bench.compare.result import Facts, Figure

LONGEST_ANSWER = 1 << 20  # bytes
ENDING_SECONDS = 2.0  # between the end of a process's output and its own


class Ready(msgspec.Struct, frozen=True, tag_field="kind", tag="ready"):
    version: str
    settings: dict[str, object]


class Seconds(msgspec.Struct, frozen=True, tag_field="kind", tag="seconds"):
    seconds: list[float]


class Failed(msgspec.Struct, frozen=True, tag_field="kind", tag="failed"):
    error: str


Answer = Ready | Seconds | Failed


class Piped:
    """Raises PeerFailed with one line when the process ends, hangs, or says what is no answer."""

    def __init__(self, child: Child, orders: Mapping[str, object], start_limit: float, limit: float) -> None:
        """Returns when it has loaded what `orders` name, within `start_limit` seconds; a run has `limit`."""
        self._child = child
        self._limit = limit
        self._unread = b""
        os.set_blocking(child.input, False)
        answer = self._ask(orders, start_limit, "starting")
        if not isinstance(answer, Ready):
            raise child.failed(f"it answered its orders with {type(answer).__name__}")
        self.facts = Facts(child.name, answer.version, answer.settings)

    def warm_up(self, scenario: Scenario) -> None:
        self.run(scenario.shortened(), WARM_UP)

    def run(self, scenario: Scenario, number: int) -> Figure:
        prompts = token_prompts(scenario, number)
        work: dict[str, object] = {"kind": scenario.kind, "prompts": prompts}
        wanted = 1
        if scenario.kind == "decode":
            wanted = scenario.tokens + UNSTEADY
            work["steps"] = wanted
        answer = self._ask(work, self._limit, scenario.name)
        if not isinstance(answer, Seconds) or len(answer.seconds) != wanted or not min(answer.seconds) > 0:
            raise self._child.failed(f"no usable times for {scenario.name}")
        prompt_tokens = scenario.rows * scenario.length
        if scenario.kind == "prefill":
            return Figure(prompt_tokens / answer.seconds[0], prompt_tokens)
        steady = answer.seconds[UNSTEADY:]
        return Figure(scenario.rows * len(steady) / sum(steady), prompt_tokens)

    def cpu_seconds(self) -> float:
        return self._child.cpu_seconds()

    def hold(self, held: bool) -> None:
        self._child.hold(held)

    def _ask(self, work: Mapping[str, object], limit: float, doing: str) -> Answer:
        line = self._exchange(msgspec.json.encode(work) + b"\n", limit, doing)
        try:
            answer = msgspec.json.decode(line, type=Answer)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise self._child.failed(f"{doing}: it wrote what is no answer: {line[:80]!r}") from None
        if isinstance(answer, Failed):
            raise self._child.failed(f"{doing}: {answer.error}")
        return answer

    def _exchange(self, work: bytes, limit: float, doing: str) -> bytes:
        """Write all of `work` and read one line, in whichever order the process allows."""
        child, until = self._child, time.monotonic() + limit
        while b"\n" not in self._unread:
            left = until - time.monotonic()
            readable, writable, _ = select.select(
                [child.output], [child.input] if work else [], [], max(0.0, left)
            )
            if not readable and not writable and left <= 0:
                raise child.failed(f"{doing}: no answer in {limit:g} s")
            if writable:
                try:
                    work = work[os.write(child.input, work) :]
                except BrokenPipeError:  # it is ending: what it still says comes first
                    work = b""
            if readable:
                piece = os.read(child.output, 1 << 16)
                if not piece:
                    raise child.failed(f"{doing}: it ended", wait=ENDING_SECONDS)
                self._unread += piece
            if len(self._unread) > LONGEST_ANSWER:
                raise child.failed(f"{doing}: an answer of more than {LONGEST_ANSWER} bytes")
        line, _, self._unread = self._unread.partition(b"\n")
        return line
