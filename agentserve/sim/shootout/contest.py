"""The shoot-out: every policy in every setting on every seed, and where each then stands.

A trial is a function of its description, so trials may run in several processes and come out the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import msgspec

from agentserve.sim.hardware import Hardware, hardware_named
from agentserve.sim.shootout.sweep import best, candidates
from agentserve.sim.shootout.world import VOCAB_SIZE, Core, Outcome, World
from agentserve.sim.traces.demand import lanes_for
from agentserve.sim.traces.draw import TraceSpec
from agentserve.sim.traces.hints import HintMix
from agentserve.sim.traces.players import Players, Receive
from tiering.policy.registry import Parameters

ORACLE, PLAIN = "oracle", "lru"
TUNING_SEEDS = 1_000_000  # seeds of the sweep begin here; reported ones stay below
MOST_OUTCOMES = 16  # kept of one policy in one setting
WARM_UP = 0.2  # share of the time that does not count


class Setting(msgspec.Struct, frozen=True):
    """What all policies face alike."""

    hardware: str
    oversubscription: float  # contexts alive over the tokens that the device pool holds
    hints: HintMix = HintMix.NONE
    events: bool = False  # clients signal that a result is about to come
    gap: float | None = None  # seconds between bursts of agents; None: as fits the machine

    def __str__(self) -> str:
        told = f"hints {self.hints.value}{', tool events' if self.events else ''}"
        told += "" if self.gap is None else f", a burst every {self.gap:g} s"
        return f"{self.hardware}, {self.oversubscription:g}×, {told}"


class Entrant(msgspec.Struct, frozen=True):
    """A policy by name, with its parameters; None: it has none, or its defaults."""

    name: str
    parameters: Parameters | None = None


class Trial(msgspec.Struct, frozen=True):
    setting: Setting
    entrant: Entrant
    seed: int
    seconds: float  # virtual


class Arena(msgspec.Struct, frozen=True):
    """How a core with a policy is made, and what the server makes of hints. Functions of modules, so that
    other processes find them by name."""

    build: Callable[[Hardware, Entrant, TraceSpec], Core]
    receive: Receive
    accepts: Callable[[Entrant], bool]  # whether the policy takes these parameters


class Standing(msgspec.Struct, frozen=True):
    """One policy in one setting, over all seeds: means, but for what says otherwise."""

    setting: Setting
    policy: str
    parameters: dict[str, float]
    turns_per_second: float
    of_oracle: float | None  # turns/s over the oracle's on the same seed, averaged; None: no oracle ran
    least_of_lru: float | None  # the least over seeds of turns/s over LRU's
    resume_ttft_p50: float  # medians over seeds
    resume_ttft_p95: float
    recomputed: float  # tokens
    moved: dict[str, float]  # bytes by move
    oversubscribed: float  # as it came out
    failed: int  # all of them
    wedged: tuple[str, ...]
    outcomes: tuple[Outcome, ...]  # one per seed; of more than MOST_OUTCOMES the first
    turns: int = 0  # that ended, of all seeds
    least_turns: int = 0  # of one seed


def trace_of(hardware: Hardware, setting: Setting, seed: int) -> TraceSpec:
    """The agents that a machine gets."""
    lengths = msgspec.structs.asdict(hardware.trace)
    if setting.gap is not None:
        lengths["gap"] = setting.gap
    return TraceSpec(**lengths, seed=seed, hints=setting.hints, events=setting.events)


def run_trial(arena: Arena, trial: Trial) -> Outcome:
    hardware = hardware_named(trial.setting.hardware)
    spec = trace_of(hardware, trial.setting, trial.seed)
    lanes = lanes_for(spec, trial.setting.oversubscription * hardware.pool_tokens)
    core = arena.build(hardware, trial.entrant, spec)
    world = World(hardware, core, Players(spec, lanes, VOCAB_SIZE, arena.receive))
    return world.run(WARM_UP * trial.seconds, trial.seconds)


def tune(
    arena: Arena,
    hardware: str,
    entrants: Sequence[Entrant],
    *,
    oversubscription: float,
    budget: int,
    seeds: int,
    seconds: float,
    jobs: int = 1,
) -> list[Entrant]:
    """Each entrant with the best of `budget` parameter sets on one machine, without hints, by turns/s.
    Who has no parameters stays as it is."""
    setting = Setting(hardware, oversubscription)

    def tuned(entrant: Entrant) -> Entrant:
        if entrant.parameters is None:
            return entrant
        drawn = candidates(
            entrant.parameters, budget, TUNING_SEEDS, lambda one: arena.accepts(Entrant(entrant.name, one))
        )
        found = [Entrant(entrant.name, one) for one in drawn]
        trials = [Trial(setting, one, TUNING_SEEDS + seed, seconds) for one in found for seed in range(seeds)]
        outcomes = list(run_all(arena, trials, jobs))
        scores = {
            id(one): statistics.fmean(_score(each) for each in outcomes[at * seeds : (at + 1) * seeds])
            for at, one in enumerate(found)
        }
        return best(found, lambda one: scores[id(one)])[0]

    return [tuned(entrant) for entrant in entrants]


def run_all(arena: Arena, trials: Sequence[Trial], jobs: int = 1) -> Iterator[Outcome]:
    """Outcomes in the order of the trials."""
    if jobs <= 1:
        yield from map(partial(run_trial, arena), trials)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(partial(run_trial, arena), trials)


def contest(
    arena: Arena,
    settings: Sequence[Setting],
    entrants: Callable[[str], Sequence[Entrant]],
    seeds: Sequence[int],
    *,
    seconds: Callable[[str], float],
    jobs: int = 1,
    progress: Callable[[Trial, Outcome], None] = lambda trial, outcome: None,
) -> list[Standing]:
    """Standings by setting, and within one in the order of the entrants.

    entrants, seconds: who runs on a machine, and for how long. progress: told of each trial.
    """
    trials = [
        Trial(setting, entrant, seed, seconds(setting.hardware))
        for setting in settings
        for entrant in entrants(setting.hardware)
        for seed in seeds
    ]
    outcomes: dict[tuple[Setting, str], list[Outcome]] = {}
    for trial, outcome in zip(trials, run_all(arena, trials, jobs), strict=True):
        progress(trial, outcome)
        outcomes.setdefault((trial.setting, trial.entrant.name), []).append(outcome)
    return [
        _standing(setting, entrant, outcomes)
        for setting in settings
        for entrant in entrants(setting.hardware)
    ]


def _standing(
    setting: Setting, entrant: Entrant, outcomes: dict[tuple[Setting, str], list[Outcome]]
) -> Standing:
    own = outcomes[setting, entrant.name]
    of_oracle = _ratios(own, outcomes.get((setting, ORACLE)))
    of_lru = _ratios(own, outcomes.get((setting, PLAIN)))
    return Standing(
        setting=setting,
        policy=entrant.name,
        parameters=_plain(entrant.parameters),
        turns_per_second=statistics.fmean(one.turns_per_second for one in own),
        of_oracle=statistics.fmean(of_oracle) if of_oracle else None,
        least_of_lru=min(of_lru, default=None),
        resume_ttft_p50=statistics.median(one.resume_ttft_p50 for one in own),
        resume_ttft_p95=statistics.median(one.resume_ttft_p95 for one in own),
        recomputed=statistics.fmean(one.recomputed for one in own),
        moved={
            move: statistics.fmean(one.moved.get(move, 0) for one in own)
            for move in dict.fromkeys(move for one in own for move in one.moved)
        },
        oversubscribed=statistics.fmean(one.oversubscribed for one in own),
        failed=sum(one.failed for one in own),
        wedged=tuple(one.wedged for one in own if one.wedged),
        outcomes=tuple(own[:MOST_OUTCOMES]),
        turns=sum(one.turns for one in own),
        least_turns=min(one.turns for one in own),
    )


def _score(outcome: Outcome) -> float:
    return 0.0 if outcome.wedged else outcome.turns_per_second


def _ratios(own: Sequence[Outcome], other: Sequence[Outcome] | None) -> list[float]:
    """Turns/s over those of another policy on the same seed; 1 where neither ended a turn."""
    return [
        (mine.turns_per_second / theirs.turns_per_second) if theirs.turns_per_second else 1.0
        for mine, theirs in zip(own, other or (), strict=other is not None)
    ]


def _plain(parameters: Parameters | None) -> dict[str, float]:
    if parameters is None:
        return {}
    values = msgspec.structs.asdict(parameters)
    return {name: value for name, value in values.items() if isinstance(value, (bool, int, float))}
