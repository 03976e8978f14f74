"""Which GPUs run the kernels, and what is said of those that do not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from triton import knobs

import kernels.triton.backend
from kernels import backend_for
from kernels.reference import ReferenceOps
from kernels.triton.backend import check_files, described, triton_version, unfit
from kernels.triton.ops import TritonOps
from tiering.stores.packing import KernelPacking, PlainPacking, packing_for

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("capability", "trouble", "expected"),
    [((9, 0), None, KernelPacking), ((7, 5), None, PlainPacking), ((9, 0), "no compiler", PlainPacking)],
)
def test_small_pages_are_packed_by_kernels_where_these_run(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], trouble: str | None, expected: type
) -> None:
    monkeypatch.setattr(kernels.triton.backend, "gpu", lambda device: ("some", capability))
    monkeypatch.setattr(kernels.triton.backend, "not_launching", lambda: trouble)
    assert type(packing_for(CUDA, (32, 64))) is expected
    assert type(packing_for(CUDA, (32, 40))) is PlainPacking


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)])
def test_these_run_the_kernels(capability: tuple[int, int]) -> None:
    assert unfit(capability, "3.9.0") is None


def test_these_do_not_and_why() -> None:
    assert unfit((7, 5), "3.9.0") == "its compute capability is 7.5, the kernels need 8.0"
    assert unfit((9, 0), None) == "triton cannot be imported"


def test_triton_is_found() -> None:
    assert triton_version() is not None
    assert described("NVIDIA H200", (9, 0), "3.9.0") == "triton 3.9.0 (NVIDIA H200, compute capability 9.0)"


def test_a_gpu_that_fits_gets_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.triton.backend, "gpu", lambda device: ("NVIDIA H200", (9, 0)))
    monkeypatch.setattr(kernels.triton.backend, "not_launching", lambda: None)
    backend = backend_for(CUDA)
    assert isinstance(backend.ops, TritonOps)
    assert backend.reason.startswith("triton ")
    assert "NVIDIA H200" in backend.reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_what_launches_kernels_it_is_the_reference_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels.triton.backend, "gpu", lambda device: ("NVIDIA H200", (9, 0)))
    backend = backend_for(CUDA)
    assert isinstance(backend.ops, ReferenceOps)
    assert backend.reason.startswith(
        "reference (NVIDIA H200: triton cannot launch kernels (it needs a C compiler"
    )


def test_a_cache_that_cannot_be_written_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernels.triton.backend, "gpu", lambda device: ("NVIDIA H200", (9, 0)))
    monkeypatch.setattr(kernels.triton.backend, "not_launching", lambda: None)
    folder = tmp_path / "file" / "cache"
    with knobs.cache.scope():
        knobs.cache.dir = str(folder)
        (tmp_path / "file").write_text("")
        with pytest.raises(
            ValueError, match=re.escape(f"compiled kernels in {folder} (Not a directory): name")
        ):
            backend_for(CUDA)
        (tmp_path / "file").unlink()
        assert isinstance(backend_for(CUDA).ops, TritonOps)
        assert list(folder.iterdir()) == []


def test_a_damaged_table_is_told(tmp_path: Path) -> None:
    check_files("NVIDIA H200")
    (tmp_path / "default.json").write_text("{")
    with pytest.raises(ValueError, match=r"tuned table default\.json: Input data was truncated"):
        check_files("NVIDIA H200", tmp_path)


def test_one_that_does_not_gets_the_reference_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.triton.backend, "gpu", lambda device: ("Tesla T4", (7, 5)))
    backend = backend_for(CUDA)
    assert isinstance(backend.ops, ReferenceOps)
    assert backend.reason == "reference (Tesla T4: its compute capability is 7.5, the kernels need 8.0)"
