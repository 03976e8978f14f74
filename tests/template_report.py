"""The figures of the real templates: `python -m tests.template_report` measures and writes them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.template_families import model
from tests.template_prefixes import Kept, measure
from tests.template_table import FAMILIES, Family

HISTORIES = 200
ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "templates.json"
_HEAD = "| form | real templates | prefix kept |"


@dataclass(frozen=True)
class Figures:
    """Of `turns` that go on from another, `whole` begin with all of its tokens; `share` of the tokens are
    kept, `steady_share` with `--steady-prompt` where that changes something."""

    package: str
    file: str
    form: str
    histories: int
    turns: int
    whole: int
    share: float
    steady_share: float | None

    @classmethod
    def of(cls, family: Family, kept: Kept, steady: Kept | None) -> Figures:
        return cls(
            package=family.package,
            file=family.file,
            form=family.parser,
            histories=HISTORIES,
            turns=kept.turns,
            whole=kept.whole,
            share=round(kept.kept / kept.tokens, 3),
            steady_share=None if steady is None else round(steady.kept / steady.tokens, 3),
        )

    def near(self, other: Figures) -> bool:
        """The vocabularies are trained, so tokens may be cut a little differently elsewhere."""
        return abs(self.share - other.share) < 0.02 and (self.turns, self.whole, self.steady_share) == (
            other.turns,
            other.whole,
            other.steady_share,
        )


def recorded() -> dict[str, Figures]:
    return {
        name: Figures(**figures) for name, figures in json.loads(RESULTS.read_text())["templates"].items()
    }


def table(results: dict[str, Figures]) -> list[str]:
    """The lines of the table, one for each form of replies."""
    lines = [_HEAD, "|---|---|---|"]
    for form in dict.fromkeys(figures.form for figures in results.values()):
        names = {name: figures for name, figures in results.items() if figures.form == form}
        shown = ", ".join(f"{name} ({figures.package})" for name, figures in names.items())
        lines.append(f"| `{form}` | {shown} | {_shares(names)} |")
    return lines


def _shares(names: dict[str, Figures]) -> str:
    told = ["100 %"] if any(figures.whole == figures.turns for figures in names.values()) else []
    for name, figures in names.items():
        if figures.whole < figures.turns:
            steady = "" if figures.steady_share is None else f", steady {100 * figures.steady_share:.0f} %"
            told.append(f"{name} {100 * figures.share:.0f} %{steady}")
    return "; ".join(told)


def tables_in(document: str) -> list[str]:
    lines = (ROOT / document).read_text().splitlines()
    start = lines.index(_HEAD)
    end = next(at for at in range(start, len(lines)) if not lines[at].startswith("|"))
    return lines[start:end]


def main() -> None:
    results = {}
    for name, family in FAMILIES.items():
        steady = measure(name, steadily=True) if model(name).chat.moves else None
        results[name] = Figures.of(family, measure(name), steady)
    body = {
        "command": "python -m tests.template_report",
        "templates": {name: asdict(figures) for name, figures in results.items()},
    }
    RESULTS.write_text(json.dumps(body, indent=1) + "\n")
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
