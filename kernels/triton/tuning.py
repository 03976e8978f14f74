"""Which `Choice` a kernel runs with on which GPU: tables that are shipped, and never made while serving.

`tuned/KIND.json` holds what was measured on one kind of GPU, "h200" for whatever has that word in its name;
`tuned/default.json` what runs where nothing was measured: the kernels' own defaults. Tiles and warps decide
in which order numbers are added up, so the `digest` of what is in use is part of the backend's numerics.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from kernels.triton.launch import TRITON_NAMES, Choice

TUNED = Path(__file__).parent / "tuned"
DEFAULT = "default"

Choices = Mapping[str, Mapping[str, Choice]]
"""By kernel, then key: what of the model and dtype the choice hangs on, such as "bf16-4096"."""


class Chosen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `Choice` as a file has it."""

    tiles: dict[str, Annotated[int, Meta(ge=1, le=65_536)]]
    warps: Literal[1, 2, 4, 8, 16]
    stages: Annotated[int, Meta(ge=1, le=8)]


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a table comes from. `gpu` as its driver calls it."""

    gpu: Annotated[str, Meta(min_length=1)]
    triton: str
    torch: str


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file. `measured` is null where nothing was: for a kind of GPU there are no choices then."""

    format: Literal[1]
    kind: Annotated[str, Meta(pattern="^[a-z0-9]+$")]
    measured: Measured | None
    choices: dict[str, dict[str, Chosen]]


@dataclass(frozen=True, slots=True)
class Tunable:
    """A kernel at one model shape, for the tuner.

    `prepare(device, reduced)` makes operands (small ones if `reduced`: Triton's interpreter is slow) and
    returns what runs the kernel on them; it must not change its operands, so that it can run again.
    """

    kernel: str
    key: str
    default: Choice
    candidates: Sequence[Choice]
    prepare: Callable[[torch.device, bool], Callable[[Choice], Tensor]]


@dataclass(frozen=True, slots=True)
class Tuning:
    """The choices in use on a GPU. `kind` is "default" where there is no table for it."""

    kind: str
    choices: Choices
    digest: str

    @classmethod
    def load(cls, gpu: str, folder: Path = TUNED) -> Tuning:
        """For a GPU by the name that its driver gives it; "" where there is none.

        ValueError, one line, where a table is not what it must be.
        """
        kind = kind_of(gpu, folder)
        found = {kernel: dict(keys) for kernel, keys in read(folder / f"{DEFAULT}.json").choices.items()}
        if kind != DEFAULT:
            for kernel, keys in read(folder / f"{kind}.json").choices.items():
                found[kernel] = found.get(kernel, {}) | keys
        plain = msgspec.json.encode(found, order="sorted")
        choices = {
            kernel: {key: Choice(one.tiles, one.warps, one.stages) for key, one in keys.items()}
            for kernel, keys in found.items()
        }
        return cls(kind, choices, hashlib.sha256(plain).hexdigest()[:16])

    def choose(self, kernel: str, key: str, default: Choice) -> Choice:
        """The table's choice, or `default`. ValueError where the table's has other tiles than the default:
        it was made for another form of the kernel."""
        found = self.choices.get(kernel, {}).get(key, default)
        if set(found.tiles) != set(default.tiles):
            raise ValueError(
                f"tuned table {self.kind}: {kernel} {key} has tiles {sorted(found.tiles)}, "
                f"not {sorted(default.tiles)}"
            )
        return found


@functools.cache
def tuning_for(device: torch.device) -> Tuning:
    """The tuning of a device of this process; the default's for what is no GPU. Read once."""
    return Tuning.load(torch.cuda.get_device_name(device) if device.type == "cuda" else "")


def kind_of(gpu: str, folder: Path = TUNED) -> str:
    """The kind whose table is for a GPU of this name: "NVIDIA H200 NVL" is an "h200", a GH200 is not."""
    words = _words(gpu)
    kinds = sorted(path.stem for path in folder.glob("*.json") if path.stem != DEFAULT)
    return next((kind for kind in kinds if kind in words), DEFAULT)


def check_kind(kind: str, gpu: str) -> None:
    """ValueError, one line, where no GPU of this name would find a table that is called so, or others would:
    words without a number, such as the maker's, are of many."""
    telling = sorted(word for word in _words(gpu) if re.search("[0-9]", word))
    if kind not in telling:
        raise ValueError(f"{kind!r} names no table of {gpu}: take one of {', '.join(telling)}")


def _words(gpu: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", gpu.lower()))


def read(path: Path) -> Table:
    """ValueError, one line, where a table is missing or is not what it must be."""
    try:
        table = msgspec.json.decode(path.read_bytes(), type=Table)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"tuned table {path.name}: {error}") from None
    if table.kind != path.stem:
        raise ValueError(f"tuned table {path.name}: it is for {table.kind}")
    if table.kind != DEFAULT and table.choices and table.measured is None:
        raise ValueError(f"tuned table {path.name}: it has choices that nobody measured")
    return table


def write(table: Table, folder: Path = TUNED) -> Path:
    """Keep a table as `KIND.json`; one of before is replaced at once, never half."""
    path = folder / f"{table.kind}.json"
    beside = path.with_suffix(".new")
    beside.write_bytes(msgspec.json.format(msgspec.json.encode(table, order="sorted"), indent=1) + b"\n")
    beside.replace(path)
    return path


def as_chosen(choice: Choice) -> Chosen:
    """A choice as files have it. ValueError where no file could."""
    plain = {"tiles": dict(choice.tiles), "warps": choice.warps, "stages": choice.stages}
    try:
        return msgspec.convert(plain, Chosen)
    except msgspec.ValidationError as error:
        raise ValueError(f"{choice}: {error}") from None


def default_table(tunables: Sequence[Tunable]) -> Table:
    """What `default.json` holds: the kernels' own defaults. ValueError where two tunables have one key."""
    choices: dict[str, dict[str, Chosen]] = {}
    for one in tunables:
        keys = choices.setdefault(one.kernel, {})
        if one.key in keys:
            raise ValueError(f"two tunables are called {one.kernel} {one.key}")
        keys[one.key] = as_chosen(one.default)
    return Table(1, DEFAULT, None, choices)


def product_key(dtype: torch.dtype, out: int, width: int, tile: str) -> str:
    """Of a tile of a product with plain weights `[out, width]`: "bf16-4096x14336-64x16p"."""
    return f"{TRITON_NAMES[dtype]}-{out}x{width}-{tile}"
