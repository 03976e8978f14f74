"""Compiling ahead of time: what is found of good kernels and bad ones, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentserve.bench.gpu import ahead
from kernels.triton import catalogue
from kernels.triton.aot import Compiled, check_possible, compile_all
from kernels.triton.targets import KIB, TARGETS, Occupancy, occupancy

ROOT = Path(__file__).parents[2]
CASES = "tests.triton.aot_kernels"
WHOLE = (
    "norms.rms_norm_kernel",
    "norms.add_rms_norm_kernel",
    "norms.silu_mul_kernel",
    "heads.rotate_and_write_kernel",
    "attention.attend_kernel",
    "attention.merge_kernel",
    "plain_products.multiply",
    "part_sums.add_parts",
    "embedding.look_up_numbers",
    "embedding.look_up_blocks",
    "block_kernels.round_operands",
    "sampling_kernels.best_parts",
    "sampling_kernels.best_rows",
    "sampling_kernels.top_k_cuts",
    "sampling_kernels.weigh",
    "sampling_kernels.nuclei",
    "sampling_kernels.kept_parts",
    "sampling_kernels.pick",
)  # kernels of decode steps whose every case is in the published table
_COMPILE = """
import msgspec, sys
from kernels.triton.aot import compile_all
names, modules, capability = sys.argv[1].split(), sys.argv[2:-1], int(sys.argv[-1])
sys.stdout.buffer.write(msgspec.json.encode(compile_all((capability,), names or None, modules)))
"""


def compiled(cache: Path, names: str, capability: int, *modules: str) -> dict[str, Compiled]:
    """Cases by name (all where `names` is empty), compiled in a process whose kernels are for GPUs."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", _COMPILE, names, *modules, str(capability)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {each["case"]: Compiled(**each) for each in json.loads(done.stdout)}


def test_what_compiles_is_measured_and_what_does_not_says_why(tmp_path: Path) -> None:
    real = "rms_norm-bf16-576 gather_pages-smollm2-135m-2-16"
    found = compiled(
        tmp_path, f"scale-bf16 hoard-fp32 wrong greedy unnamed {real}", 90, CASES, *catalogue.MODULES
    )
    assert [found[name].fault for name in real.split()] == ["", ""]
    good = found["scale-bf16"]
    assert good.fault == ""
    assert good.capability == 90
    assert good.kernel == "aot_kernels.scale"
    assert 8 < good.registers < 64
    assert good.spilled == 0
    assert 0 < good.shared < KIB
    assert good.blocks * good.warps == 64
    assert found["hoard-fp32"].spilled > 1000
    assert "a decode kernel spills" in found["hoard-fp32"].fault
    assert "nonsense" in found["wrong"].fault
    assert "n is a number that Triton specialises" in found["greedy"].fault
    assert "rows" in found["unnamed"].fault


def test_decode_kernels_at_the_edge_of_their_registers_do_not_spill(tmp_path: Path) -> None:
    """Those that did on sm_80 with the choices of their neighbours."""
    edge = "product-bf16-Q8_0-4096x4096-64x64p attention-qwen2.5-7b-bf16-i8-16"
    found = compiled(tmp_path, edge, 80, "kernels.triton.block_products", "kernels.triton.attention")
    assert [(found[name].decode, found[name].fault) for name in edge.split()] == [(True, "")] * 2


@pytest.mark.prove
@pytest.mark.parametrize("capability", TARGETS)
def test_all_kernels_compile_and_no_decode_kernel_spills(tmp_path: Path, capability: int) -> None:
    found = compiled(tmp_path, "", capability, *catalogue.MODULES)
    assert list(found) == list(catalogue.cases(capability))
    assert {name: each.fault for name, each in found.items() if each.fault} == {}


@pytest.mark.prove
@pytest.mark.parametrize("capability", TARGETS)
def test_a_server_compiles_while_it_prepares_and_never_by_the_step(tmp_path: Path, capability: int) -> None:
    """As Triton itself sees the arguments, which the interpreter and `Case` do not show."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.triton.served_step", str(capability)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["prepared"]) > 15
    assert found["served"] == []
    assert [one for one in found["prepared"] if one[1] or one[2]] == []


def test_a_process_that_interprets_kernels_says_that_it_cannot_compile() -> None:
    with pytest.raises(RuntimeError, match="unset it"):
        check_possible()
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        compile_all()


def test_occupancy_by_hand() -> None:
    hopper, ampere = TARGETS[90], TARGETS[80]
    # 32 registers x 32 threads = 1,024 a warp: 64 warps; a block of 4 warps
    assert occupancy(hopper, 4, 32, 0) == Occupancy(16, 64, "warps")
    # 72 x 32 = 2,304: 28.4 warps, by fours 28; blocks of 8: 3
    assert occupancy(hopper, 8, 72, 0) == Occupancy(3, 24, "registers")
    assert occupancy(hopper, 1, 16, 0) == Occupancy(32, 32, "blocks")
    # 64 KiB and the one that the system takes: 3 times in 228, twice in 164
    assert occupancy(hopper, 4, 32, 64 * KIB) == Occupancy(3, 12, "shared memory")
    assert occupancy(ampere, 4, 32, 64 * KIB) == Occupancy(2, 8, "shared memory")
    assert occupancy(ampere, 4, 32, 163 * KIB).blocks == 1
    assert occupancy(ampere, 4, 32, 163 * KIB + 1) == Occupancy(0, 0, "shared memory")
    assert occupancy(TARGETS[100], 4, 32, 0, columns=256) == Occupancy(2, 8, "tensor memory")
    assert occupancy(hopper, 4, 256, 0).blocks == 0


def test_the_table_tells_the_least_favourable_figures_and_replaces_itself_alone() -> None:
    def one(case: str, capability: int, **figures: object) -> Compiled:
        return Compiled(case, "m.k", capability, True, 4, 2, **figures)  # type: ignore[arg-type]

    results = [
        one("a", 80, registers=40, blocks=12, bound="registers"),
        one("a", 90, registers=40, shared=2 * KIB, blocks=12, bound="registers"),
        one("b", 80, error="no"),
        one("b", 90, registers=64, spilled=8, blocks=8, bound="registers"),
    ]
    table = ahead.table(ahead.AheadReport("", {"torch": "1", "triton": "2"}, {}, results))
    row = next(line for line in table.splitlines() if "m.k" in line)
    assert row.startswith("| `m.k` (decode) | 2 | 1 do not compile, 40 registers, 0 KB, 48 warps (registers)")
    assert "40 to 64 registers, 2 KB, 32 warps (registers), 1 spill, up to 8 B" in row
    told = [
        "- `a` on sm_90: ",
        "- `b` on sm_80: no",
        "- `b` on sm_90: a decode kernel spills 8 bytes of each thread",
    ]
    assert [line in table for line in told] == [False, True, True]
    text = f"before\n{ahead.BEGIN}\nold\n{ahead.END}\nafter\n"
    changed = ahead.into(text, table)
    assert changed == f"before\n{ahead.BEGIN}\n{table}{ahead.END}\nafter\n"
    assert ahead.generated(changed) == table
    with pytest.raises(ValueError, match="no generated part"):
        ahead.into("nothing here", table)


def test_a_table_in_parts_has_the_newest_of_each_case_in_the_order_of_the_list() -> None:
    def report(command: str, *cases: tuple[str, int, int], triton: str = "2") -> ahead.AheadReport:
        results = [
            Compiled(case, "m.k", capability, True, 4, 2, registers=registers)
            for case, capability, registers in cases
        ]
        return ahead.AheadReport(command, {"triton": triton}, {}, results)

    before = report("one", ("gone", 80, 1), ("b", 80, 2), ("b", 90, 3))
    found = ahead.joined(before, report("two", ("b", 90, 4), ("a", 80, 5)), ["a", "b"])
    assert [(each.case, each.capability, each.registers) for each in found.results] == [
        ("a", 80, 5), ("b", 80, 2), ("b", 90, 4),
    ]  # fmt: skip
    assert found.command == "one && two"
    assert ahead.joined(found, report("two", ("a", 80, 6)), ["a", "b"]).command == "one && two"
    with pytest.raises(ValueError, match="other versions"):
        ahead.joined(before, report("two", triton="3"), [])


def test_cases_of_kernels_are_listed() -> None:
    found = catalogue.cases(90)
    products = catalogue.of_kernels(found, ["block_kernels.multiply_blocks"], decode=False)
    decode = catalogue.of_kernels(found, ["block_kernels.multiply_blocks"], decode=True)
    assert set(decode) < set(products)
    assert {name for name in products if name not in decode} == {
        name for name in products if not found[name].decode
    }


def test_some_of_each_kernel_are_selected() -> None:
    found = catalogue.cases(90)
    names = catalogue.selected(found, each=2)
    assert len(set(names)) == len(names)
    assert {catalogue.kernel_name(found[name]) for name in names} == {
        catalogue.kernel_name(case) for case in found.values()
    }
    assert [name for name in names if name.startswith("silu_mul")] == [
        "silu_mul-bf16-1536",
        "silu_mul-bf16-18944",
    ]


def test_the_published_table_is_of_all_kernels() -> None:
    """If it fails: agentserve bench kernels-aot --results benchmarks/results --readme benchmarks/README.md,
    then the same with --decode --add and --kernel for each of `WHOLE` (or --all instead of both)."""
    found = ahead.read(ROOT / "benchmarks/results/aot.json")
    for capability in TARGETS:
        told = [one.case for one in found.results if one.capability == capability]
        known = catalogue.cases(capability)
        wanted = {*catalogue.selected(known), *catalogue.of_kernels(known, WHOLE, decode=True)}
        assert told == [name for name in known if name in wanted]
    for capability in (80, 90, 100):
        known = catalogue.cases(capability)
        for one in found.results:
            if one.capability == capability:
                case = known[one.case]
                now = (case.choice.warps, case.choice.stages, case.decode)
                assert now == (one.warps, one.stages, one.decode), one.case
    text = (ROOT / "benchmarks/README.md").read_text()
    assert ahead.generated(text) == ahead.table(found)
    for one in found.results:
        assert not one.fault or f"- `{one.case}` on sm_{one.capability}: {one.fault}" in text
    assert [one.case for one in found.results if one.decode and one.fault] == []
