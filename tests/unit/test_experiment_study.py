"""The experiment's body: cells that are kept, sweeps, reports, and what must not be compared."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from agentserve.bench.traces.agreement import agreement, shown
from agentserve.sim.experiment.cells import (
    Cell,
    CellResult,
    CellStore,
    Identity,
    Incomparable,
    check_comparable,
)
from agentserve.sim.experiment.clients import Load, Promises
from agentserve.sim.experiment.engines import Entrant, SloRule, promises
from agentserve.sim.experiment.page import html
from agentserve.sim.experiment.record import RequestRecord
from agentserve.sim.experiment.report import COLUMNS, TracesReport, against, load_report, markdown, row
from agentserve.sim.experiment.run import Enough, Recorded
from agentserve.sim.experiment.script import Trace
from agentserve.sim.experiment.stage import Imagined
from agentserve.sim.experiment.study import Plan, Study, TraceStudy
from agentserve.sim.experiment.synthetic import Lengths, draw
from agentserve.sim.hardware import hardware_named

TINY = msgspec.structs.replace(hardware_named("tiny"), device_kv=8_000_000)
TRACE = draw("chat", 20, lengths=Lengths(chat_prompt=160, chat_output=8))
ENTRANTS = (Entrant("chunked", "chunked"), Entrant("ours", "fair-resumes"))
PLAN = Plan(guess=4.0, rates=(0.5, 1.5), caps=(2,))
RULE = SloRule(ttft=1.0, tbt=0.5)


class Counting:
    """A stage that counts what it plays, and breaks down after so many cells."""

    def __init__(self, breaks_after: int = 1_000_000, hardware=TINY) -> None:  # type: ignore[no-untyped-def]
        self.played = 0
        self._left = breaks_after
        self._stage = Imagined(hardware)
        self.label, self.digest = self._stage.label, self._stage.digest

    def identity(self, trace: Trace) -> Identity:
        return self._stage.identity(trace)

    def play(
        self, entrant: Entrant, trace: Trace, load: Load, promises: Promises, enough: Enough
    ) -> Recorded:
        if self.played == self._left:
            raise KeyboardInterrupt
        self.played += 1
        return self._stage.play(entrant, trace, load, promises, enough)


def study_of(stage: Counting, folder: Path | None, rule: SloRule = RULE) -> Study:
    return Study(stage, CellStore(folder), promises(TINY, rule), str(rule))


def report_of(study: TraceStudy) -> TracesReport:
    return TracesReport(
        "traces-tiny", "agentserve sim traces", {}, {}, "simulated: tiny", TINY, RULE, PLAN, (study,)
    )


@pytest.fixture(scope="module")
def found() -> TraceStudy:
    return study_of(Counting(), None).trace(TRACE, ENTRANTS, PLAN)


# --- the body -----------------------------------------------------------------------------------


def test_all_face_the_same_sessions_at_the_same_rates(found: TraceStudy) -> None:
    chunked, ours = found.stands
    assert [stand.entrant.name for stand in found.stands] == ["chunked", "ours"]
    assert [each.cell.rate for each in chunked.sweep] == [each.cell.rate for each in ours.sweep]
    assert {each.cell.cap for each in chunked.capped} == {2}
    assert found.requests == 20
    for stand in found.stands:
        assert stand.knee is not None
        assert stand.knee.found
        below, above = (each.figures.attainment for each in stand.sweep)
        assert below >= 0.9 > above
        assert not any(each.cut for each in stand.sweep)
        assert set(stand.sweep[0].by_tenant) == {"blue", "green", "red"}
        assert set(stand.sweep[0].by_kind) == {"chat"}


def test_an_experiment_goes_on_where_it_was_interrupted(tmp_path: Path, found: TraceStudy) -> None:
    first = Counting(breaks_after=7)
    with pytest.raises(KeyboardInterrupt):
        study_of(first, tmp_path).trace(TRACE, ENTRANTS, PLAN)
    second = Counting()
    assert study_of(second, tmp_path).trace(TRACE, ENTRANTS, PLAN) == found
    third = Counting()
    assert study_of(third, tmp_path).trace(TRACE, ENTRANTS, PLAN) == found
    assert third.played == 0
    assert first.played == 7
    assert second.played > 7


def test_a_changed_setting_makes_a_new_cell(tmp_path: Path) -> None:
    load = Load(4.0)
    stage = Counting()
    study_of(stage, tmp_path).cell(TRACE, ENTRANTS[0], load)
    study_of(stage, tmp_path).cell(TRACE, ENTRANTS[0], load)
    assert stage.played == 1
    study_of(stage, tmp_path, SloRule(ttft=2.0, tbt=0.5)).cell(TRACE, ENTRANTS[0], load)
    study_of(stage, tmp_path).cell(TRACE, ENTRANTS[1], load)
    study_of(stage, tmp_path).cell(TRACE, ENTRANTS[0], Load(4.0, cap=3))
    other = draw("chat", 20, seed=2, lengths=Lengths(chat_prompt=160, chat_output=8))
    study_of(stage, tmp_path).cell(other, ENTRANTS[0], load)
    assert stage.played == 5
    quick = Counting(hardware=msgspec.structs.replace(TINY, per_token=TINY.per_token / 2))
    study_of(quick, tmp_path).cell(TRACE, ENTRANTS[0], load)
    assert quick.played == 1


def test_a_cell_that_was_damaged_is_run_again(tmp_path: Path) -> None:
    stage = Counting()
    first = study_of(stage, tmp_path).cell(TRACE, ENTRANTS[0], Load(4.0))
    (path,) = (tmp_path / "cells").glob("*.json")
    path.write_bytes(path.read_bytes()[:-40])
    assert study_of(stage, tmp_path).cell(TRACE, ENTRANTS[0], Load(4.0)) == first
    (tmp_path / "logs" / f"{first.cell.key}.requests.jsonl").unlink()
    assert study_of(stage, tmp_path).cell(TRACE, ENTRANTS[0], Load(4.0)) == first
    assert stage.played == 3


def test_the_raw_log_of_a_cell_says_what_its_figures_are_of(tmp_path: Path) -> None:
    store = CellStore(tmp_path)
    study = Study(Counting(), store, promises(TINY, RULE), "rule")
    result = study.cell(TRACE, ENTRANTS[0], Load(4.0))
    logged: list[RequestRecord] = store.requests(result.cell)
    assert len(logged) == 20
    assert result.figures.requests == 18  # without the warm-up
    assert {each.tenant for each in logged} <= set(TRACE.weights)


def test_a_probe_ends_as_soon_as_it_has_missed_too_much() -> None:
    stage = Counting()
    study = study_of(stage, None)
    long = draw("chat", 60, lengths=Lengths(chat_prompt=160, chat_output=8))
    whole = study.cell(long, ENTRANTS[0], Load(50.0))
    knee = study.knee(long, ENTRANTS[0], Plan(guess=50.0))
    assert whole.figures.attainment < 0.9
    assert knee.probed["50"] < 0.9
    assert knee.probed["50"] >= whole.figures.attainment


# --- reports ------------------------------------------------------------------------------------


def test_the_table_has_a_row_for_each_policy(found: TraceStudy) -> None:
    text = markdown(report_of(found))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(ENTRANTS)
    assert {line.count("|") for line in lines} == {len(COLUMNS) + 1}
    assert "full size (simulated: tiny; 20 sessions, 20 requests)" in text


def test_the_scale_stands_over_every_table_and_chart(found: TraceStudy) -> None:
    scaled = msgspec.structs.replace(found, scale=0.0625)
    assert "all lengths x 0.0625" in markdown(report_of(scaled))
    page = html(report_of(scaled))
    titles = re.findall(r'font-size="15">([^<]*)</text>', page)
    assert titles
    assert all("lengths x 0.0625" in title for title in titles)


def test_the_page_needs_nothing_from_elsewhere(found: TraceStudy) -> None:
    page = html(report_of(found))
    assert page.count("<svg") >= 5
    assert not re.search(r"(src|href)=|@import|<script|url\(", page)
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}


def test_a_report_comes_back_as_it_was(tmp_path: Path, found: TraceStudy) -> None:
    report = report_of(found)
    (tmp_path / "r.json").write_bytes(msgspec.json.encode(report))
    again = load_report(tmp_path / "r.json")
    assert row(again.studies[0].stands[0], again.studies[0]) == row(found.stands[0], found)
    rows = against(report, again)
    assert [each[-1] for each in rows] == ["1.000", "1.000"]
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(Incomparable, match=r"x\.json: no report of traces"):
        load_report(tmp_path / "x.json")


@pytest.mark.parametrize("field", ["model", "quantisation", "sampler", "graph_capture", "trace"])
def test_runs_that_differ_in_what_counts_are_not_compared(field: str, found: TraceStudy) -> None:
    def changed(result: CellResult) -> CellResult:
        cell: Cell = result.cell
        identity = msgspec.structs.replace(cell.identity, **{field: "another"})
        return msgspec.structs.replace(result, cell=msgspec.structs.replace(cell, identity=identity))

    stands = tuple(
        msgspec.structs.replace(stand, sweep=tuple(map(changed, stand.sweep))) for stand in found.stands
    )
    other = report_of(msgspec.structs.replace(found, stands=stands))
    with pytest.raises(Incomparable, match=f"{field.replace('_', ' ')} differs") as caught:
        against(report_of(found), other)
    assert "\n" not in str(caught.value)
    one = found.stands[0].sweep[0].cell.identity
    check_comparable(one, msgspec.structs.replace(one, **{field: "another"}), frozenset({field}))


def test_reports_without_anything_in_common_are_not_compared(found: TraceStudy) -> None:
    other = report_of(msgspec.structs.replace(found, trace="long"))
    with pytest.raises(Incomparable, match="no trace and policy in common"):
        against(report_of(found), other)


def test_a_simulation_agrees_within_fifteen_percent_or_not(found: TraceStudy) -> None:
    simulated = found.stands[0].sweep[0]
    figures = simulated.figures
    assert figures.ttft is not None

    def measured(ttft: float, tokens: float) -> CellResult:
        assert figures.ttft is not None
        spread = msgspec.structs.replace(figures.ttft, p50=figures.ttft.p50 * ttft)
        rate = figures.tokens_per_second * tokens
        return msgspec.structs.replace(
            simulated, figures=msgspec.structs.replace(figures, ttft=spread, tokens_per_second=rate)
        )

    near = agreement("chat", "ours", [measured(3.0, 1.0), measured(1.1, 0.95), measured(0.2, 1.0)], simulated)
    assert near.holds
    assert near.off == pytest.approx(1 - 1 / 1.1)
    assert shown(near)[-1] == "yes"
    assert not agreement("chat", "ours", [measured(1.0, 1.3)], simulated).holds
