"""`agentserve sim`: the server's own core in virtual time; and replay of recorded logs."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from agentserve.cli.output import fail
from agentserve.cli.sim_policies import policies
from agentserve.cli.sim_traces import traces

if TYPE_CHECKING:
    from agentserve.core.cost import StepCost

sim = typer.Typer(help="Run the engine core in virtual time.", no_args_is_help=True, rich_markup_mode=None)
sim.command("policies")(policies)
sim.command("traces")(traces)


@sim.command("run")
def run(
    *,
    agents: Annotated[int, typer.Option(min=1)] = 16,
    turns: Annotated[int, typer.Option(min=1)] = 4,
    task: Annotated[int, typer.Option(min=1, help="Mean tokens of a first message.")] = 2200,
    append: Annotated[int, typer.Option(min=1, help="Mean tokens of a tool result.")] = 150,
    output: Annotated[int, typer.Option(min=1, help="Mean tokens of an answer.")] = 32,
    arrivals: Annotated[float, typer.Option(min=0.001, help="Agents per second.")] = 0.5,
    pool: Annotated[int, typer.Option(min=64, help="KV pool in tokens.")] = 23_000,
    max_num_seqs: Annotated[int, typer.Option(min=1)] = 64,
    max_batched_tokens: Annotated[int, typer.Option(min=16)] = 1024,
    per_token: Annotated[float, typer.Option(min=0.0, help="Seconds a token row takes.")] = 0.001,
    fixed: Annotated[float, typer.Option(min=0.0, help="Seconds any step takes.")] = 0.02,
    per_context: Annotated[float, typer.Option(min=0.0, help="Seconds per pair attended.")] = 2e-7,
    step_model: Annotated[
        Path | None, typer.Option(help="What steps take, by `agentserve fit`; instead of the three above.")
    ] = None,
    seed: Annotated[int, typer.Option()] = 1,
    record: Annotated[Path | None, typer.Option(help="Write the ordered log here.")] = None,
) -> None:
    """Agents against one simulated worker; the same seed gives the same history."""
    from agentserve.core.config import CoreConfig
    from agentserve.core.cost import StepCost
    from agentserve.core.record import Entry, encode_entry
    from agentserve.sim.run import Simulation
    from agentserve.sim.workload import WorkloadSpec, make_workload
    from agentserve.types import FinishReason

    spec = WorkloadSpec(
        agents=agents, turns=turns, task=task, append=append, output=output,
        arrivals_per_second=arrivals, seed=seed,
    )  # fmt: skip
    config = CoreConfig(
        max_num_seqs=max_num_seqs, max_batched_tokens=max_batched_tokens, max_model_len=1 << 20
    )
    cost = StepCost(fixed=fixed, per_token=per_token, per_context=per_context)
    if step_model is not None:
        cost = _fitted(step_model)
    log: list[Entry] = []
    simulation = Simulation(
        make_workload(spec), config, pages=pool // config.page_size, cost=cost,
        log=log.append if record is not None else None,
    )  # fmt: skip
    outcome = simulation.run()
    if record is not None:
        record.write_bytes(b"".join(encode_entry(entry) for entry in log))
    first = [turn.ttft for turn in outcome.turns if turn.turn == 1]
    resumed = [turn.ttft for turn in outcome.turns if turn.turn > 1]
    typer.echo(
        f"{len(outcome.turns)} turns in {outcome.seconds:.1f} s of virtual time, {outcome.steps} steps"
    )
    typer.echo(f"TTFT of first turns  {_spread(first)}")
    typer.echo(f"TTFT of resumes      {_spread(resumed)}")
    typer.echo(
        f"prompt tokens {sum(turn.prompt for turn in outcome.turns)}, "
        f"cached {sum(turn.cached for turn in outcome.turns)}, "
        f"computed {sum(turn.computed for turn in outcome.turns)}, "
        f"preemptions {sum(turn.preemptions for turn in outcome.turns)}"
    )
    refused = sum(turn.reason is FinishReason.REFUSED for turn in outcome.turns)
    if refused:
        fail(f"{refused} turns were refused: they do not fit the pool of {pool} tokens")
    if outcome.unfinished:
        fail(f"never finished: {', '.join(outcome.unfinished)}")


@sim.command("replay")
def replay(
    log: Annotated[Path, typer.Argument(help="A log of `serve --record` or `sim run --record`.")],
) -> None:
    """Feed a recorded log into a new core and compare every plan."""
    from agentserve.core.record import decode_entries
    from agentserve.sim.replay import ReplayError, named_parts
    from agentserve.sim.replay import replay as feed

    try:
        found = feed(decode_entries(log.read_bytes()), named_parts)
    except (OSError, ReplayError, msgspec.MsgspecError) as error:
        fail(f"{log}: {error}")
    if found.differs_at is not None:
        fail(f"{log}: plan {found.differs_at} differs from the recorded one")
    if not found.plans:
        fail(f"{log}: no plan to compare{', the log is cut short' if found.cut else ''}")
    cut = "; the log is cut short after them" if found.cut else ""
    typer.echo(f"{found.commands} commands replayed, {found.plans} plans, all identical{cut}")


def _fitted(path: Path) -> StepCost:
    from agentserve.core.timing.saved import CostFileError, decode_saved

    try:
        return decode_saved(path.read_bytes()).cost
    except CostFileError as error:
        fail(f"{path}: {error}")
    except OSError as error:
        fail(f"{path}: {error.strerror or error}")


def _spread(values: list[float]) -> str:
    if not values:
        return "none"
    ordered = sorted(values)
    high = ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))]
    return f"P50 {statistics.median(values):.3f} s, P95 {high:.3f} s"
