"""`agentserve bench agents`: agent traces in real time, on this engine or against any server's URL."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console

from agentserve.cli.output import fail
from agentserve.machine import usable_cores
from agentserve.values import size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentserve.bench.agents.remote import Peer
    from agentserve.bench.agents.summary import Summary
    from agentserve.messages import TiersView
    from agentserve.sim.traces.draw import TraceSpec

    Settings = Mapping[str, str | None]


class Load(StrEnum):
    AGENTS = "agents"
    PRESSURE = "pressure"


def agents(
    *,
    load: Annotated[
        Load, typer.Option(help="Coding agents; or sixteen plain ones of 3,000 tokens.")
    ] = Load.AGENTS,
    count: Annotated[int, typer.Option("--agents", min=1, help="So many come.")] = 16,
    lanes: Annotated[int, typer.Option(min=1, help="So many at once.")] = 16,
    turns: Annotated[float | None, typer.Option(min=1, help="Mean turns of a coding agent.")] = None,
    task: Annotated[int | None, typer.Option(min=1, help="Mean tokens of its first message.")] = None,
    context_limit: Annotated[
        int | None, typer.Option(min=64, help="Tokens that no agent's context exceeds, but for an answer.")
    ] = None,
    hints: Annotated[
        str, typer.Option(help="What clients say: none, honest, noisy, wrong, hostile, mixed.")
    ] = "none",
    events: Annotated[bool, typer.Option(help="Clients signal results before they bring them.")] = False,
    longest_wait: Annotated[float, typer.Option(min=0.1, help="Waits are cut off there (s).")] = 30.0,
    seed: Annotated[int, typer.Option()] = 1,
    url: Annotated[
        str | None, typer.Option(help="A server to drive instead (http://host:port/v1): text, without hints.")
    ] = None,
    api_key: Annotated[str, typer.Option(help="For --url.")] = "",
    min_tokens: Annotated[bool, typer.Option(help="For --url: also ask that no reply ends early.")] = False,
    model: Annotated[str | None, typer.Option(show_default="smollm2-135m; m with --url")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32.", show_default="bf16")] = None,
    weights: Annotated[str | None, typer.Option(help="expanded or stored.", show_default="stored")] = None,
    threads: Annotated[str | None, typer.Option(show_default="all cores")] = None,
    max_batched_tokens: Annotated[str | None, typer.Option(help="Tokens per step.")] = None,
    device_kv: Annotated[str, typer.Option(help="KV pool.")] = "512MiB",
    host_kv: Annotated[str | None, typer.Option(help="KV in the host's memory.", show_default="none")] = None,
    disk_kv: Annotated[
        str | None, typer.Option(help="KV on disk, in --data-dir.", show_default="none")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where KV on disk lies.")] = None,
    tier_policy: Annotated[str, typer.Option(help="Who decides where KV goes.")] = "priced",
    results: Annotated[Path | None, typer.Option(help="Write JSON into this folder.")] = None,
) -> None:
    """Agents with tools that wait in real time: TTFT of resumes, turns/s, turns in time. Some minutes."""
    from agentserve.bench.agents.remote import Peer
    from agentserve.bench.agents.summary import table
    from agentserve.sim.traces.draw import TraceSpec, pressure
    from agentserve.sim.traces.hints import HintMix

    try:
        mix = HintMix(hints)
    except ValueError:
        fail(f"--hints {hints[:64]}: there are {', '.join(each.value for each in HintMix)}")
    spec = pressure(seed) if load is Load.PRESSURE else TraceSpec(seed=seed)
    changes = {"turns": turns, "task": task, "context_limit": context_limit}
    spec = msgspec.structs.replace(
        spec, hints=mix, events=events, longest_wait=min(longest_wait, spec.longest_wait),
        **{name: value for name, value in changes.items() if value is not None},
    )  # fmt: skip
    settings = {
        "model": model, "dtype": dtype, "weights": weights, "threads": threads, "device_kv": device_kv,
        "max_batched_tokens": max_batched_tokens,
    }  # fmt: skip
    below = {
        "host_kv": host_kv, "disk_kv": disk_kv, "data_dir": str(data_dir) if data_dir else None,
        "tier_policy": tier_policy,
    }  # fmt: skip
    tiers: TiersView | None = None
    try:
        if url is not None:
            summary = _remote(Peer(url, model or "m", api_key, min_tokens), spec, lanes, count)
        else:
            summary, tiers = _live(settings, below, spec, lanes, count)
    except (ValueError, OSError, RuntimeError) as error:
        fail(str(error))
    console = Console()
    console.print(table(summary))
    if tiers is not None:
        hits = ", ".join(f"{name} {tokens:,}" for name, tokens in tiers.hit_tokens.items())
        moved = ", ".join(f"{name} {blocks:,}" for name, (blocks, _) in tiers.moved.items())
        console.print(f"prompt tokens found by tier: {hits}\nblocks moved: {moved}")
    if results is not None:
        _write(results, spec, summary, {**settings, **below} if url is None else {"url": url}, tiers)
    if summary.errors:
        fail(f"{summary.errors} turns failed, the first: {summary.error}")


def _remote(peer: Peer, spec: TraceSpec, lanes: int, count: int) -> Summary:
    from agentserve.bench.agents.remote import RemoteRun
    from agentserve.bench.agents.summary import summarise

    run = RemoteRun(peer, spec, lanes, count)
    seconds = asyncio.run(run.run())
    return summarise(run.turns, run.errors, seconds)


def _live(
    settings: Settings, below: Settings, spec: TraceSpec, lanes: int, count: int
) -> tuple[Summary, TiersView | None]:
    from agentserve.server.workers.supervisor import worker_environment

    # The model runs in this process: its kernel threads must wait as a worker's do. Read by libgomp
    # when torch loads it, so before that import.
    os.environ.update(worker_environment())
    from agentserve.bench.agents.engine import play
    from agentserve.bench.agents.tiers import TierOptions
    from agentserve.config import load
    from agentserve.server.workers.build import build_engine
    from agentserve.server.workers.spec import worker_spec

    folder = below["data_dir"]
    options = TierOptions(
        host=size(below["host_kv"]) if below["host_kv"] else 0,
        disk=size(below["disk_kv"]) if below["disk_kv"] else 0,
        data_dir=Path(folder) if folder else None,
        policy=below["tier_policy"] or "priced",
    )
    built = build_engine(worker_spec(load(settings, None), 0, "", os.getpid(), usable_cores()))
    return play(built, options, spec, lanes, count)


def _write(
    folder: Path, spec: TraceSpec, summary: Summary, settings: Settings, tiers: TiersView | None
) -> None:
    from agentserve.bench import report
    from agentserve.bench.agents.summary import AgentsReport

    found = AgentsReport(
        command=shlex.join(["agentserve", *sys.argv[1:]]),
        machine=report.machine(),
        versions=report.versions(),
        settings={name: value for name, value in settings.items() if value is not None},
        trace=spec,
        summary=summary,
        tiers=tiers,
    )
    typer.echo(f"written to {report.write(found, folder)}")
