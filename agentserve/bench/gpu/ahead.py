"""What compiling ahead of time found, as JSON and as the table in `benchmarks/README.md`."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from agentserve import __version__
from kernels.triton.aot import Compiled
from kernels.triton.targets import KIB, TARGETS, Target

BEGIN = "<!-- written by `agentserve bench kernels-aot`: begin -->"
END = "<!-- written by `agentserve bench kernels-aot`: end -->"


class AheadReport(msgspec.Struct, frozen=True):
    """`aot.json`. `results` by case, then capability."""

    command: str
    versions: Mapping[str, str]
    targets: Mapping[str, str]
    results: Sequence[Compiled]
    benchmark: str = "aot"


def report(command: str, results: Sequence[Compiled]) -> AheadReport:
    """Nothing of the machine is in it but versions: it decides nothing that is told."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "triton")}
    versions |= {"agentserve-llm": __version__, "python": platform.python_version()}
    targets = {target.name: target.gpus for target in TARGETS.values()}
    return AheadReport(command, versions, targets, results)


def joined(before: AheadReport, now: AheadReport, order: Sequence[str]) -> AheadReport:
    """`now`, and what `before` has of cases of `order` on targets that are not in it; both commands.

    ValueError where they were made with other versions. Whoever joins answers for that kernels compiled
    before have not changed since.
    """
    if before.versions != now.versions:
        raise ValueError("what is there was compiled with other versions")
    place = {name: at for at, name in enumerate(order)}
    found = {(one.case, one.capability): one for one in (*before.results, *now.results)}
    kept = [one for one in found.values() if one.case in place]
    kept.sort(key=lambda one: (place[one.case], one.capability))
    commands = dict.fromkeys([*before.command.split(" && "), now.command])
    return msgspec.structs.replace(now, command=" && ".join(commands), results=kept)


def read(path: Path) -> AheadReport:
    """Raises OSError, or ValueError where it is no such report."""
    return msgspec.json.decode(path.read_bytes(), type=AheadReport)


def into(text: str, table: str) -> str:
    """A README with its generated part replaced. ValueError where it has none."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError("there is no generated part in it")
    return f"{before}{BEGIN}\n{table}{END}{after}"


def generated(text: str) -> str:
    """The generated part of a README."""
    return text.partition(BEGIN)[2].partition(END)[0].lstrip("\n")


def table(found: AheadReport) -> str:
    """A row for each kernel: of its cases the least favourable figures on each target."""
    names = [TARGETS[capability] for capability in dict.fromkeys(one.capability for one in found.results)]
    head = ["kernel", "cases", *(f"{target.name} ({target.gpus})" for target in names)]
    lines = [_line(head), _line(["---"] * len(head))]
    for kernel in dict.fromkeys(one.kernel for one in found.results):
        of = [one for one in found.results if one.kernel == kernel]
        cases = len(dict.fromkeys(one.case for one in of))
        step = " (decode)" if any(one.decode for one in of) else ""
        lines.append(_line([f"`{kernel}`{step}", str(cases), *(_cell(of, target) for target in names)]))
    made = ", ".join(f"{name} {found.versions[name]}" for name in ("triton", "torch"))
    wrong = [f"- `{one.case}` on sm_{one.capability}: {one.fault}" for one in found.results if one.fault]
    faults = ["", "Not as it must be, and not mended yet:", "", *wrong] if wrong else []
    return "\n".join([f"Compiled with {made}.", "", *lines, *faults, ""])


def _cell(of: Iterable[Compiled], target: Target) -> str:
    here = [one for one in of if one.capability == target.capability]
    good = [one for one in here if not one.error]
    told = [f"{len(here) - len(good)} do not compile"] if len(good) < len(here) else []
    if good:
        least = min(good, key=lambda one: one.blocks * one.warps)
        told.append(f"{_span(good, lambda one: one.registers)} registers")
        told.append(f"{max(one.shared for one in good) / KIB:.3g} KB")
        told.append(f"{least.blocks * least.warps} warps ({least.bound})")
        spilling = [one for one in good if one.spilled]
        if spilling:
            told.append(f"{len(spilling)} spill, up to {max(one.spilled for one in spilling)} B")
    return ", ".join(told)


def _span(of: Sequence[Compiled], figure: Callable[[Compiled], int]) -> str:
    least, most = min(map(figure, of)), max(map(figure, of))
    return str(most) if least == most else f"{least} to {most}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
