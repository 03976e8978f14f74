"""Machines as cost models: what a step and a copy take, how large the pools are, and how that is known."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from pathlib import Path

import msgspec

from agentserve.core.cost import StepCost
from agentserve.core.timing.saved import CostFileError, decode_saved
from tiering.policy.base import Prices


class HardwareError(ValueError):
    """There is no such machine, or its file is none; one line."""


class Lengths(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Agents that fit such a machine: means in tokens, turns, and seconds between bursts."""

    prefix: int
    task: int
    result: int
    output: int
    turns: float
    context_limit: int
    gap: float


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One machine serving one model. Rates are in bytes/s, times in seconds, sizes in bytes.

    A step takes fixed + per_row·rows + per_token·tokens + per_read·(context tokens read) +
    per_context·(pairs attended). `per_read` is what decoding pays for a long context, where memory and
    not arithmetic limits; a prefill reads its context once per chunk.
    """

    name: str
    model: str
    how: tuple[str, ...]  # how each figure was measured or derived, with sources
    fixed: float
    per_row: float
    per_token: float
    per_read: float
    per_context: float
    kv_token_bytes: int
    page_size: int
    device_kv: int
    host_kv: int
    disk_kv: int
    copy_latency: float  # of one transfer between device and host
    save_rate: float  # device -> host
    load_rate: float  # host -> device
    disk_latency: float
    write_rate: float  # host -> disk
    fetch_rate: float  # disk -> device, verified
    max_num_seqs: int
    max_batched_tokens: int
    trace: Lengths
    fitted: StepCost | None = None  # of recorded steps; it then says what a step takes, in place of the above

    @property
    def block_bytes(self) -> int:
        return self.kv_token_bytes * self.page_size

    @property
    def pages(self) -> int:
        return self.device_kv // self.block_bytes

    @property
    def pool_tokens(self) -> int:
        return self.pages * self.page_size

    def step(self, chunks: Iterable[tuple[int, int]]) -> float:
        """Seconds of a step of chunks (start, count)."""
        return self.step_cost().step(chunks)

    def step_cost(self) -> StepCost:
        """What steps take, and what the core predicts."""
        if self.fitted is not None:
            return self.fitted
        return StepCost(
            fixed=self.fixed,
            per_row=self.per_row,
            per_token=self.per_token,
            per_context=self.per_context,
            per_seen=self.per_read,
            per_reach=self.per_read,
        )

    def prices(self) -> Prices:
        """What policies are told at the start."""
        size = self.block_bytes
        return Prices(
            block_bytes=size,
            save=(self.copy_latency, size / self.save_rate),
            load=(self.copy_latency, size / self.load_rate),
            write=(self.disk_latency, size / self.write_rate),
            fetch=(self.disk_latency, size / self.fetch_rate),
            prefill=self.step_cost().prefill_line(self.max_batched_tokens),
            page_size=self.page_size,
        )


def hardware_names() -> tuple[str, ...]:
    """The machines that come with the package."""
    folder = resources.files(__name__)
    return tuple(
        sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))
    )


def hardware_named(name: str) -> Hardware:
    """A machine by name; NAME@FILE is that machine with steps as the cost model in FILE has them. Raises
    HardwareError."""
    name, at, file = name.partition("@")
    known = hardware_names()
    if name not in known:
        raise HardwareError(f'no hardware "{name}"; known: {", ".join(known)}')
    text = resources.files(__name__).joinpath(f"{name}.json").read_bytes()
    try:
        machine = msgspec.json.decode(text, type=Hardware)
    except msgspec.MsgspecError as error:
        raise HardwareError(f"{name}.json: {error}") from error
    return fitted_to(machine, Path(file)) if at else machine


def fitted_to(machine: Hardware, file: Path) -> Hardware:
    """`machine` with the steps of a cost model that was fitted. Raises HardwareError."""
    try:
        saved = decode_saved(file.read_bytes())
    except CostFileError as error:
        raise HardwareError(f"{file}: {error}") from None
    except OSError as error:
        raise HardwareError(f"{file}: {error.strerror or error}") from None
    whose = saved.fingerprint
    how = (
        f"steps: as fitted to {saved.steps} of {whose.machine}, {whose.threads} threads, "
        f"model {whose.model[:12]}; off by {saved.held_out.mape:.1%} on steps held out",
        *machine.how,
    )
    return msgspec.structs.replace(machine, name=f"{machine.name}@{file}", how=how, fitted=saved.cost)
