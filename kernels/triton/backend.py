"""Whether a GPU can run the kernels, and what it is, in a sentence."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

LEAST = (8, 0)  # compute capability: bfloat16 in tensor cores, asynchronous copies
_ROOM = 1 << 20  # bytes that the cache's disk must have: some kernels'


def unfit(capability: tuple[int, int], triton_version: str | None) -> str | None:
    """Why a GPU cannot run the kernels; None where it can. triton_version: None where there is none."""
    if capability < LEAST:
        return f"its compute capability is {_dotted(capability)}, the kernels need {_dotted(LEAST)}"
    if triton_version is None:
        return "triton cannot be imported"
    return None


def triton_version() -> str | None:
    """None where Triton cannot be imported."""
    try:
        import triton
    except Exception:  # it loads libraries that may be of another CUDA
        return None
    found: str = triton.__version__
    return found


def refusal(device: torch.device) -> str | None:
    """Why this GPU does not run the kernels; None where it does."""
    return unfit(gpu(device)[1], triton_version()) or not_launching()


def not_launching() -> str | None:
    """Why kernels cannot be launched, None where they can: Triton builds a module of C for that, once, with
    the machine's compiler and Python's headers."""
    try:
        from triton.runtime import driver

        driver.active.get_current_target()
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        return f"triton cannot launch kernels (it needs a C compiler and Python's headers): {lines[-1]}"
    return None


def check_files(gpu: str, tables: Path | None = None) -> None:
    """ValueError, one line, where the table of choices for a GPU of this name is damaged, or Triton has no
    place for what it compiles (without one it runs nothing). Said here, it is said before weights are read.

    tables: another folder than the shipped one.
    """
    from triton import knobs

    from kernels.triton.tuning import TUNED, Tuning

    Tuning.load(gpu, tables or TUNED)
    folder = Path(knobs.cache.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(_ROOM))
    except OSError as error:
        why = f"Triton cannot keep compiled kernels in {folder} ({error.strerror})"
        raise ValueError(f"{why}: name another folder in TRITON_CACHE_DIR") from None


def described(name: str, capability: tuple[int, int], version: str) -> str:
    return f"triton {version} ({name}, compute capability {_dotted(capability)})"


def gpu(device: torch.device) -> tuple[str, tuple[int, int]]:
    """Its name and compute capability."""
    return torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
