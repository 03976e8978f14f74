"""A built engine with tiers below: its core anew, real stores, and the mover between."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import cast

import msgspec

from agentserve.clock import WallClock
from agentserve.core.config import CoreConfig
from agentserve.core.cost import StepCost
from agentserve.core.engine import EngineCore
from agentserve.core.market import TierParts, TierSetup
from agentserve.executor.calibrate import Bounds, measure_cost
from agentserve.executor.runner import TorchExecutor
from agentserve.server.workers.worker_main import BuiltEngine
from tiering.policy.base import Prices
from tiering.policy.registry import policy_named
from tiering.prices import PriceBook
from tiering.stores.disk import DiskStore
from tiering.stores.host import HostStore, staging_slots
from tiering.stores.mover import Mover
from tiering.stores.pages import PoolPages

# Where the online estimates begin, in bytes per second: no machine's, and soon forgotten.
COPY_RATE, WRITE_RATE, FETCH_RATE = 5e9, 0.25e9, 1e9
LATENCY = 1e-4


class TierOptions(msgspec.Struct, frozen=True):
    """What is below the device; sizes in bytes, 0: none of it."""

    host: int = 0
    disk: int = 0
    data_dir: Path | None = None
    policy: str = "priced"


def with_tiers(built: BuiltEngine, options: TierOptions, stack: ExitStack) -> tuple[EngineCore, Mover | None]:
    """The engine's core, over the tiers that `options` ask for; what is opened is closed by `stack`.

    Raises ValueError (also StoreError) in one line where a tier cannot be had.
    """
    assert isinstance(built.executor, TorchExecutor)
    config = cast(CoreConfig, built.config)
    if not options.host and not options.disk:
        return EngineCore(config, built.groups, built.pages, built.cost), None
    pool = built.executor.pool
    device = PoolPages(pool.storages, [group.layers for group in pool.groups])
    if device.copies is not None:
        built.executor.expect(device.copies)
    staging = not options.host
    slots = staging_slots(device.block_bytes) if staging else options.host // device.block_bytes
    if slots < 1:
        raise ValueError(f"--host-kv: one block has {device.block_bytes} bytes")
    host = HostStore(slots, device.block_bytes, device.pinned)
    disk = None
    if options.disk:
        if options.data_dir is None:
            raise ValueError("--disk-kv needs --data-dir")
        namespace = bytes.fromhex(built.hello.namespace)
        disk = DiskStore(
            options.data_dir / "kv" / "bench", namespace, options.disk, device.block_bytes,
            page_size=config.page_size,
        )  # fmt: skip
        stack.callback(disk.close)
    prices = _start_prices(built, device.block_bytes, config)
    setup = TierSetup(
        policy=options.policy,
        host_slots=slots,
        disk_bytes=disk.room if disk is not None else 0,
        block_bytes=device.block_bytes,
        prices=prices,
        entries=tuple(disk.entries()) if disk is not None else (),
        staging=staging,
    )
    parts = TierParts(setup, policy_named(options.policy, prices), PriceBook(prices))
    mover = Mover(device, host, disk, WallClock())
    stack.callback(mover.close)
    return EngineCore(config, built.groups, built.pages, built.cost, parts), mover


def _start_prices(built: BuiltEngine, block_bytes: int, config: CoreConfig) -> Prices:
    cost = _measured(built, config)
    return Prices(
        block_bytes=block_bytes,
        save=(LATENCY, block_bytes / COPY_RATE),
        load=(LATENCY, block_bytes / COPY_RATE),
        write=(LATENCY, block_bytes / WRITE_RATE),
        fetch=(LATENCY, block_bytes / FETCH_RATE),
        prefill=cost.prefill_line(config.max_batched_tokens),
        page_size=config.page_size,
    )


def _measured(built: BuiltEngine, config: CoreConfig) -> StepCost:
    hello = built.hello
    if built.cost != StepCost():
        return built.cost
    bounds = Bounds(
        groups=len(built.groups),
        pages=min(built.pages),
        page_size=config.page_size,
        positions=hello.max_model_len,
        rows=config.max_num_seqs,
        tokens=config.max_batched_tokens,
        vocab_size=hello.vocab_size,
    )
    return measure_cost(built.executor, bounds)
