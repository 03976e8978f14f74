"""The tiers below a worker's device, put together: stores, mover, prices and policy, as the settings say."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from agentserve.clock import WallClock
from agentserve.core.cost import StepCost
from agentserve.core.market import TierParts, TierSetup
from agentserve.executor.pool import KVPool
from agentserve.server.workers.sizes import TierSizes
from agentserve.server.workers.spec import WorkerSpec
from tiering.policy.registry import policy_named
from tiering.prices import PriceBook, starting_prices
from tiering.stores.device_copies import DeviceCopies
from tiering.stores.disk import DiskStore, adopt_orphans
from tiering.stores.environment import StoreError, worker_folder
from tiering.stores.faults import Fault, no_fault
from tiering.stores.host import HostStore
from tiering.stores.mover import Mover
from tiering.stores.pages import PoolPages
from tiering.stores.peers import Peers

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltTiers:
    """What a core needs of its tiers, and what moves the bytes."""

    parts: TierParts
    mover: Mover
    release: Callable[[], None]  # closes the stores, when the mover no longer uses them
    copies: DeviceCopies | None = None  # for which steps wait, where restores go on beside them


def build_tiers(
    spec: WorkerSpec,
    sizes: TierSizes,
    pool: KVPool,
    namespace: bytes,
    fault: Fault = no_fault,
    *,
    cost: StepCost | None = None,
) -> BuiltTiers:
    """cost: what steps take, where that is known: so computing is priced from the start.

    Raises StoreError (a ValueError, one line) where the disk cannot be had, unless a dead worker is
    replaced: then there is no disk."""
    device = PoolPages(pool.storages, [group.layers for group in pool.groups])
    host = HostStore(sizes.host_slots, device.block_bytes, device.pinned) if sizes.host_slots else None
    disk, disk_error = _disk(spec, sizes, namespace, fault)
    peers = _open_peers(spec, sizes, disk, namespace) if disk is not None else None
    prices = starting_prices(device.block_bytes, spec.page_size)
    if cost is not None and cost.known:
        prices = msgspec.structs.replace(prices, prefill=cost.prefill_line(spec.max_batched_tokens))
    setup = TierSetup(
        policy=spec.tier_policy,
        host_slots=sizes.host_slots,
        disk_bytes=disk.room if disk is not None else 0,
        block_bytes=device.block_bytes,
        prices=prices,
        entries=tuple(disk.entries()) if disk is not None else (),
        staging=sizes.staging,
        peers=peers is not None,
        faults=disk.take_faults() if disk is not None else (),
        disk_error=disk_error,
    )
    if disk is not None and setup.entries:
        log.info("%d blocks of KV are on disk", len(setup.entries))
    parts = TierParts(setup, policy_named(spec.tier_policy, prices), PriceBook(prices))

    def release() -> None:
        if peers is not None:
            peers.close()
        if disk is not None:
            disk.close()

    mover = Mover(device, host, disk, WallClock(), fault=fault, peers=peers)
    return BuiltTiers(parts, mover, release, device.copies)


def _disk(spec: WorkerSpec, sizes: TierSizes, namespace: bytes, fault: Fault) -> tuple[DiskStore | None, str]:
    """The disk; or None, and why there is none where there should be one."""
    if not sizes.disk_budget:
        return None, ""
    try:
        return _open_disk(spec, sizes, namespace, fault), ""
    except StoreError as error:
        if not spec.replaces:
            raise
        log.error("serving without KV on disk: %s", error)
        return None, str(error)


def _open_disk(spec: WorkerSpec, sizes: TierSizes, namespace: bytes, fault: Fault) -> DiskStore:
    assert spec.data_dir is not None  # the settings saw to that
    data_dir = Path(spec.data_dir)
    folder = worker_folder(data_dir, spec.index)
    disk = DiskStore(
        folder, namespace, sizes.disk_budget, sizes.block_bytes, page_size=spec.page_size, fault=fault
    )
    adopt_orphans(disk, data_dir, spec.kv_share)
    return disk


def _open_peers(spec: WorkerSpec, sizes: TierSizes, disk: DiskStore, namespace: bytes) -> Peers | None:
    """The other workers' folders, where there are others; each is opened when it is first asked."""
    if spec.kv_share < 2 or not spec.peers or spec.data_dir is None:
        return None
    data_dir = Path(spec.data_dir)
    return Peers(data_dir, lambda: disk.folders, namespace, sizes.disk_budget, sizes.block_bytes)
