"""The whole engine on the device: decode and prefill of a model, and agents whose KV does not fit."""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Sequence

import msgspec

from agentserve.bench.agents.engine import play
from agentserve.bench.agents.tiers import TierOptions
from agentserve.bench.drive import Drive
from agentserve.bench.gpu.device import Device
from agentserve.bench.gpu.engine import engine
from agentserve.bench.gpu.limits import MEMORY
from agentserve.bench.gpu.result import Check, Part
from agentserve.bench.gpu.sizes import Sizes
from agentserve.bench.gpu.timed import Limits
from agentserve.bench.report import Row
from agentserve.bench.speed import Costs
from agentserve.executor.runner import TorchExecutor
from agentserve.messages import Close, ResetPrefixCache, Submit, Token, TurnEnded, pack_tokens
from agentserve.server.workers.worker_main import BuiltEngine
from agentserve.sim.traces.draw import LONGEST, TraceSpec, pressure
from agentserve.types import Sampling, SessionId, TurnId
from kernels.ops import Ops

ROOM = "8GiB"
PRESSED_ROOM = "512MiB"  # half of what sixteen agents of 3,000 tokens come to with the small model
HOST_ROOM = 2 << 30


def model(on: Device, sizes: Sizes, ops: Ops, limits: Limits) -> Part:
    """Decode steps and prefills through core and executor."""
    built = engine(on, sizes, ops, ROOM)
    drive, rows = Drive(built), []
    for sessions, context in sizes.whole:
        prompts = [_prompt(n, context) for n in range(sessions)]
        runs = tuple(1e3 * seconds for seconds in drive.decode(prompts, sizes.steps))
        limit = 1e3 * _step_bytes(built, sessions, context) / limits[MEMORY]
        name = f"decode, {sessions} x {context} tokens"
        rows.append(
            Row(name, statistics.median(runs), "ms/step", limit, MEMORY, runs=runs, group="whole model")
        )
    for length in sizes.prompts:
        runs = tuple(length / drive.prefill([_prompt(n, length)]) for n in range(3))
        rows.append(
            Row(
                f"prefill, {length} tokens", statistics.median(runs), "tokens/s",
                higher_is_better=True, runs=runs, group="whole model",
            )
        )  # fmt: skip
    check = same_tokens(built, sizes)
    notes = [f"{built.hello.backend}: {built.hello.backend_reason}", _how_steps_ran(built)]
    return Part("model", rows, [check], notes)


def _how_steps_ran(built: BuiltEngine) -> str:
    assert isinstance(built.executor, TorchExecutor)
    runs = built.executor.decoder.runs
    return f"steps: {runs.replayed} replayed, {runs.missed} not recorded, {runs.launched} launched"


def _step_bytes(built: BuiltEngine, sessions: int, context: int) -> int:
    assert isinstance(built.executor, TorchExecutor)
    costs = Costs.of(built.executor.decoder, built)
    return costs.weight_bytes + sessions * context * costs.kv_bytes


def _prompt(number: int, length: int) -> list[int]:
    return [(number * 7 + i * 31) % 150 + 5 for i in range(length)]


def agents(on: Device, sizes: Sizes, ops: Ops) -> Part:
    """Agents with tools that wait, over a pool that holds half of them, and the host's memory below."""
    built = engine(on, sizes, ops, PRESSED_ROOM)
    spec, count, host = _fitting(pressure(), built.hello.max_model_len), 16, HOST_ROOM
    if on.reduced:
        spec, count, host = _small(spec), 2, 1 << 20
    summary, tiers = play(built, TierOptions(host=host), spec, count, count)
    checks = [
        Check("no turn of an agent failed", not summary.errors, summary.error),
        Check("agents came back", summary.resumes > 0, f"{summary.resumes} of {summary.turns} turns"),
    ]
    rows = [
        Row("TTFT of resumes, P50", 1e3 * summary.resume_ttft_p50, "ms", group="agents"),
        Row("TTFT of resumes, P95", 1e3 * summary.resume_ttft_p95, "ms", group="agents"),
        Row("gap between tokens, P99", 1e3 * summary.gap_p99, "ms", group="agents"),
        Row("turns in time", summary.in_time, "turns", summary.turns, "all", True, group="agents"),
        Row("all of it", summary.seconds, "s", group="agents"),
    ]
    moved = ", ".join(f"{name} {blocks:,}" for name, (blocks, _) in tiers.moved.items()) if tiers else ""
    return Part("agents", rows, checks, [f"blocks moved: {moved or 'none'}"])


def _fitting(spec: TraceSpec, limit: int) -> TraceSpec:
    """Agents whose sessions a model of `limit` tokens can hold, and who do not wait long."""
    longest = min(spec.context_limit, limit - round(LONGEST * spec.output))
    return msgspec.structs.replace(spec, context_limit=longest, gap=0.5, longest_wait=4.0)


def _small(spec: TraceSpec) -> TraceSpec:
    return msgspec.structs.replace(
        spec, prefix=4, task=12, result=4, output=2, turns=2.0, gap=0.1, longest_wait=0.2, context_limit=60
    )


def same_tokens(built: BuiltEngine, sizes: Sizes) -> Check:
    """Whether greedy sessions say the same alone and side by side."""
    context = sizes.whole[-1][1]
    prompts = [_prompt(n, context + n) for n in range(3)]
    together = said(built, prompts, sizes.steps)
    alone = [said(built, [prompt], sizes.steps)[0] for prompt in prompts]
    wrong = sum(a != b for a, b in zip(together, alone, strict=True))
    return Check(
        "sessions say the same alone and side by side", not wrong, f"{wrong} differ" if wrong else ""
    )


def said(built: BuiltEngine, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """What greedy turns say, prompt by prompt. ValueError where one fails."""
    core = built.core
    core.handle(ResetPrefixCache(0), 0.0)
    names = [SessionId(f"said-{number}") for number in range(len(prompts))]
    found: dict[SessionId, list[int]] = {name: [] for name in names}
    sampling = Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for name, prompt in zip(names, prompts, strict=True):
        core.handle(Submit(name, TurnId(1), pack_tokens(array("i", prompt)), sampling), 0.0)
    while core.has_work:
        plan = core.begin_step(0.0)
        if plan is None:
            raise ValueError("the KV pool is too small for what is compared")
        core.finish_step(built.executor.run(plan), 0.0)
    for name in names:
        core.handle(Close(name), 0.0)
    for event in core.take_events():
        if isinstance(event, TurnEnded) and event.error:
            raise ValueError(event.error)
        if isinstance(event, Token):
            found[event.session].append(event.token)
    return list(found.values())
