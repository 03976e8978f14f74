"""Whether a simulation of this machine says what was measured on it, cell by cell."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from agentserve.sim.experiment.cells import CellResult
from agentserve.sim.experiment.clients import Load
from agentserve.sim.experiment.script import Trace
from agentserve.sim.experiment.study import Study, TraceStudy

ALLOWED = 0.15  # that a median TTFT, or tokens/s, may be off


class Agreement(msgspec.Struct, frozen=True):
    """One setting: medians over the attempts of each."""

    trace: str
    policy: str
    rate: float
    ttft: tuple[float, float]  # median, measured and simulated (s)
    tokens_per_second: tuple[float, float]

    @property
    def off(self) -> float:
        """The larger of the two shares by which the simulation is off what was measured."""
        return max(_off(*self.ttft), _off(*self.tokens_per_second))

    @property
    def holds(self) -> bool:
        return self.off <= ALLOWED


def agreement(trace: str, policy: str, measured: Sequence[CellResult], simulated: CellResult) -> Agreement:
    """measured: attempts of one setting, of which the one with the median TTFT counts."""
    ordered = sorted(measured, key=_median_ttft)
    middle = ordered[len(ordered) // 2]
    return Agreement(
        trace,
        policy,
        simulated.cell.rate,
        (_median_ttft(middle), _median_ttft(simulated)),
        (middle.figures.tokens_per_second, simulated.figures.tokens_per_second),
    )


def shown(found: Agreement) -> list[str]:
    return [
        *(found.trace, found.policy, f"{found.rate:.3g}"),
        f"{found.ttft[0]:.3f} / {found.ttft[1]:.3f}",
        f"{found.tokens_per_second[0]:.2f} / {found.tokens_per_second[1]:.2f}",
        f"{found.off:.1%}",
        "yes" if found.holds else "no",
    ]


def agreements(found: TraceStudy, trace: Trace, twin: Study, patience: float | None) -> list[Agreement]:
    """Every setting that was measured, simulated by `twin`."""
    made = []
    for stand in found.stands:
        settings: dict[tuple[float, int | None], list[CellResult]] = {}
        for result in (*stand.sweep, *stand.capped):
            settings.setdefault((result.cell.rate, result.cell.cap), []).append(result)
        for (rate, cap), measured in settings.items():
            simulated = twin.cell(trace, stand.entrant, Load(rate, cap, patience))
            made.append(agreement(trace.title, stand.entrant.name, measured, simulated))
    return made


COLUMNS = ("trace", "policy", "rate", "median TTFT, measured / simulated", "tokens/s", "off", "within 15 %")


def _median_ttft(result: CellResult) -> float:
    return result.figures.ttft.p50 if result.figures.ttft is not None else 0.0


def _off(measured: float, simulated: float) -> float:
    if not measured:
        return 0.0 if not simulated else 1.0
    return abs(simulated - measured) / measured
