"""Tables of choices: what is shipped, what is refused, and a tuner's run in the interpreter."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import triton.language as tl
from torch import Tensor

from agentserve.bench.gpu.device import find
from agentserve.bench.gpu.tune import Trial, same, tune
from kernels.triton.launch import Choice, kernel, launch
from kernels.triton.tunables import tunables
from kernels.triton.tuning import (
    TUNED,
    Chosen,
    Measured,
    Table,
    Tunable,
    Tuning,
    check_kind,
    default_table,
    kind_of,
    read,
    tuning_for,
    write,
)

GPU = "NVIDIA H200 NVL"
HERE = Measured(GPU, "3", "2")


def folder_with(folder: Path, **choices: dict[str, dict[str, Chosen]]) -> Path:
    for kind, of in choices.items():
        write(Table(1, kind, None if kind == "default" else HERE, of), folder)
    return folder


def test_shipped_tables_are_valid_and_hold_nothing_that_nobody_measured() -> None:
    kinds = {path.stem for path in TUNED.glob("*.json")}
    assert kinds == {"default", "a100", "h100", "h200", "b200"}
    for kind in kinds:
        assert (read(TUNED / f"{kind}.json").choices == {}) == (kind != "default")


def test_the_default_table_is_what_the_kernels_have() -> None:
    """If it fails: agentserve bench tune-kernels --defaults"""
    assert read(TUNED / "default.json") == default_table(tunables())


def test_a_gpu_is_known_by_a_word_of_its_name() -> None:
    names = {
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H200": "h200",
        "NVIDIA B200": "b200",
        "NVIDIA GH200 480GB": "default",
        "NVIDIA L40S": "default",
        "": "default",
    }
    assert {name: kind_of(name) for name in names} == names
    assert tuning_for(torch.device("cpu")).kind == "default"


def test_a_kind_that_no_gpu_would_find_is_refused() -> None:
    """Else its table is measured for an hour and then never read."""
    check_kind("h200", GPU)
    check_kind("4090", "NVIDIA GeForce RTX 4090")
    for kind in ("H200", "h100", "h200 nvl", "../h200", "default", "nvidia", ""):
        with pytest.raises(ValueError, match=f"{kind!r} names no table of {GPU}: take one of h200$"):
            check_kind(kind, GPU)


def test_what_was_measured_goes_before_the_default(tmp_path: Path) -> None:
    mine, plain = Chosen({"TILE": 64}, 8, 3), Chosen({"TILE": 32}, 4, 2)
    folder_with(tmp_path, default={"k": {"a": plain, "b": plain}}, h200={"k": {"a": mine}})
    default = Choice({"TILE": 16}, 1, 1)
    here, elsewhere = Tuning.load(GPU, tmp_path), Tuning.load("NVIDIA L4", tmp_path)
    assert here.choose("k", "a", default) == Choice({"TILE": 64}, 8, 3)
    assert here.choose("k", "b", default) == Choice({"TILE": 32}, 4, 2)
    assert here.choose("k", "c", default) == default
    assert elsewhere.choose("k", "a", default) == Choice({"TILE": 32}, 4, 2)
    with pytest.raises(ValueError, match=re.escape("has tiles ['TILE'], not ['BLOCK']")):
        here.choose("k", "a", Choice({"BLOCK": 16}))


def test_another_choice_is_another_digest(tmp_path: Path) -> None:
    plain = {"k": {"a": Chosen({"TILE": 32}, 4, 2)}}
    digest = Tuning.load(GPU, folder_with(tmp_path, default=plain)).digest
    assert Tuning.load("another", tmp_path).digest == digest
    folder_with(tmp_path, h200={"k": {"a": Chosen({"TILE": 32}, 8, 2)}})
    assert Tuning.load("another", tmp_path).digest == digest
    assert Tuning.load(GPU, tmp_path).digest != digest


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (('"warps":4', '"warps":3'), "warps"),
        (('"warps":4', '"warps":4,"more":1'), "more"),
        (('"stages":2', '"stages":0'), "stages"),
        (('"TILE":32', '"TILE":0'), "TILE|tiles"),
        (('"format":1', '"format":2'), "format"),
        (('"kind":"h200"', '"kind":"h100"'), "it is for h100"),
        (('"measured":{"gpu":"NVIDIA H200 NVL","triton":"3","torch":"2"}', '"measured":null'), "nobody"),
        ((',"format"', '"format"'), "malformed"),
    ],
)
def test_a_table_that_is_not_what_it_must_be_is_refused(
    tmp_path: Path, change: tuple[str, str], why: str
) -> None:
    folder_with(tmp_path, default={}, h200={"k": {"a": Chosen({"TILE": 32}, 4, 2)}})
    path = tmp_path / "h200.json"
    text = re.sub(r"\n *", "", path.read_text()).replace(": ", ":").replace(", ", ",")
    text = re.sub(
        r'"measured":\{[^}]*\}', '"measured":{"gpu":"NVIDIA H200 NVL","triton":"3","torch":"2"}', text
    )
    assert change[0] in text
    path.write_text(text)
    assert Tuning.load(GPU, tmp_path).kind == "h200"
    path.write_text(text.replace(*change))
    with pytest.raises(ValueError, match=why):
        Tuning.load(GPU, tmp_path)
    path.unlink()
    (tmp_path / "default.json").unlink()
    with pytest.raises(ValueError, match=r"default\.json"):
        Tuning.load(GPU, tmp_path)


@kernel("rows")
def _double(x, y, rows, BLOCK: tl.constexpr, WRONG: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < rows) * (2 + WRONG), mask=at < rows)


def _doubling(device: torch.device, reduced: bool) -> object:
    x = torch.arange(64 if reduced else 1 << 20, dtype=torch.float32, device=device)

    def run(choice: Choice) -> Tensor:
        y, rows = torch.empty_like(x), x.shape[0]
        wrong = int(choice.stages == 3)
        if choice.stages == 4:
            raise RuntimeError("out of resources")
        launch(_double, (-(-rows // choice.tiles["BLOCK"]),), x, y, rows, choice=choice, WRONG=wrong)
        return y

    return run


def test_the_tuner_tries_all_candidates_and_takes_none_that_is_wrong(tmp_path: Path) -> None:
    default = Choice({"BLOCK": 16})
    candidates = [Choice({"BLOCK": 32}), Choice({"BLOCK": 64}, 4, 3), Choice({"BLOCK": 64}, 4, 4)]
    one = Tunable("double", "fp32", default, candidates, _doubling)  # type: ignore[arg-type]
    trials: list[Trial] = []
    table = tune([one], find(interpreted=True), "interpreter", trials.append)
    assert [trial.choice for trial in trials] == [default, *candidates]
    assert [trial.refused.partition(":")[0] for trial in trials] == [
        "", "", "it computes something else", "RuntimeError",
    ]  # fmt: skip
    folder_with(tmp_path, default={})
    write(table, tmp_path)
    chosen = read(tmp_path / "interpreter.json").choices["double"]["fp32"]
    assert Tuning.load("interpreter", tmp_path).choose("double", "fp32", default).tiles in (
        {"BLOCK": 16}, {"BLOCK": 32},
    )  # fmt: skip
    assert chosen.tiles["BLOCK"] in (16, 32)


def test_a_default_that_does_not_run_ends_the_tuning() -> None:
    broken = Tunable("double", "fp32", Choice({"BLOCK": 16}, 4, 4), [], _doubling)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="out of resources"):
        tune([broken], find(interpreted=True), "interpreter")


def test_equal_is_up_to_the_order_of_additions() -> None:
    x = torch.tensor([1.0, -4.0])
    assert same(x, x)
    assert same(x + 1e-5, x)
    assert not same(x + 1e-2, x)
    assert not same(x.half(), x)
    assert not same(torch.tensor([1.0, torch.nan]), x)
    assert not same(torch.tensor([1, 2]), torch.tensor([1, 3]))


def test_every_tunable_kernel_runs_with_its_default() -> None:
    """One of each kernel, at the reduced size."""
    on = find(interpreted=True)
    listed = {one.kernel: one for one in tunables()}
    assert listed
    for one in listed.values():
        found = one.prepare(on.device, True)(one.default)
        assert bool(found.to(torch.float32).isfinite().all())
