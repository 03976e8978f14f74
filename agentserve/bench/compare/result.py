"""What a comparison found, as values: JSON for `benchmarks/results/`, rows for the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import msgspec

IDLE_CORES = 0.05  # a contestant that takes more of a core while another runs disturbs the measurement


class Facts(msgspec.Struct, frozen=True):
    """Who a contestant is: its version, and the settings it runs with."""

    name: str
    version: str
    settings: Mapping[str, object]


class Figure(msgspec.Struct, frozen=True):
    """One run: tokens per second over all rows, and how many tokens the prompts had."""

    rate: float
    prompt_tokens: int


class ScenarioRatios(msgspec.Struct, frozen=True):
    """One scenario. `runs` and `prompt_tokens` are by contestant, `ratios` by those of ours."""

    name: str
    rows: int
    decode: bool
    peer: str
    runs: Mapping[str, Sequence[float]]  # tokens per second
    prompt_tokens: Mapping[str, Sequence[int]]
    medians: Mapping[str, float]
    ratios: Mapping[str, float]  # ours / peer: above 1, ours is faster

    def milliseconds(self, contestant: str) -> float | None:
        """Of a decode step at the median rate; None for a prefill."""
        return 1e3 * self.rows / self.medians[contestant] if self.decode else None


class Setup(msgspec.Struct, frozen=True):
    """How the contestants ran some of the scenarios: one start of theirs."""

    scenarios: Sequence[str]
    peer: Facts
    ours: Sequence[Facts]


class Comparison(msgspec.Struct, frozen=True):
    benchmark: str
    command: str
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    setups: Sequence[Setup]
    rows: Sequence[ScenarioRatios]
    idle_cores: Mapping[str, float]  # what a contestant took of a core while another ran
    unit: str = "tokens/s"
    notes: Sequence[str] = ()


def scenario_ratios(
    name: str, rows: int, decode: bool, peer: str, figures: Mapping[str, Sequence[Figure]]
) -> ScenarioRatios:
    """Medians and ratios of one scenario; `figures` by contestant, `peer` one of them."""
    runs = {who: [figure.rate for figure in found] for who, found in figures.items()}
    medians = {who: statistics.median(rates) for who, rates in runs.items()}
    return ScenarioRatios(
        name,
        rows,
        decode,
        peer,
        runs,
        {who: [figure.prompt_tokens for figure in found] for who, found in figures.items()},
        medians,
        {who: median / medians[peer] for who, median in medians.items() if who != peer},
    )


def notes(rows: Sequence[ScenarioRatios], idle_cores: Mapping[str, float]) -> list[str]:
    """What a reader must know before believing the ratios; nothing if all is well."""
    found = [
        f"{row.name}: the contestants count the same prompts differently ({row.prompt_tokens})"
        for row in rows
        if len({tuple(counts) for counts in row.prompt_tokens.values()}) > 1
    ]
    found += [
        f"{name} took {cores:.0%} of a core while others ran: it disturbed them"
        for name, cores in idle_cores.items()
        if cores > IDLE_CORES
    ]
    return found


def portable(found: Comparison, names: Mapping[str, str]) -> Comparison:
    """The same with places of this machine called by `names`: what is kept is read elsewhere."""
    text = msgspec.json.encode(found).decode()
    for place, name in names.items():
        text = text.replace(msgspec.json.encode(place).decode()[1:-1], name)
    return msgspec.json.decode(text, type=Comparison)
