"""The tier manager: slots, budgets, pins, what goes first, and every way in which a transfer can end."""

from __future__ import annotations

import msgspec
import pytest

from tests.engines import PRICES
from tiering.copies import FIRST, Losers, Standing
from tiering.flights import MOST_BLOCKS
from tiering.manager import DISK_PAUSE, HEADER_BYTES, TierManager
from tiering.types import Block, DiskEntry, Move, Tier, TierFault, Transfer, TransferDone

STORED = 1000 + HEADER_BYTES


def blocks(*names: int, pages: bool = True) -> list[Block]:
    return [Block(bytes([n]) * 32, bytes([n - 1]) * 32, b"t", (n,) if pages else ()) for n in names]


def key(name: int) -> bytes:
    return bytes([name]) * 32


def done(transfer: Transfer, *bad: int, error: str = "", cancelled: bool = False) -> TransferDone:
    ok = tuple(not cancelled and index not in bad for index in range(len(transfer.blocks)))
    return TransferDone(transfer.id, ok, 0.5, error, cancelled)


def end(manager: TierManager, now: float = 0.0) -> list[Transfer]:
    """Every order ends well."""
    orders = manager.flights.take_orders()
    for transfer in orders:
        assert manager.finished(done(transfer), now) is transfer
        manager.check()
    return orders


class Worths:
    """A ranking that is told: key -> (worth, since)."""

    def __init__(self, **worths: Standing) -> None:
        self.worths = {key(int(name[1:])): standing for name, standing in worths.items()}
        self.rankings = 0

    def owned(self, key: bytes) -> bool:
        return key in self.worths

    def losers(self, tier: Tier) -> Losers:
        self.rankings += 1
        ranked = sorted(self.worths.items(), key=lambda item: item[1])
        return lambda below: (name for name, standing in ranked if standing < below)


def saved(slots: int, *names: int, disk: int = 0) -> TierManager:
    manager = TierManager(slots, disk * STORED, 1000)
    assert manager.save(blocks(*names), FIRST) == len(names)
    end(manager)
    return manager


def test_a_copy_counts_once_it_is_whole() -> None:
    manager = TierManager(4, 0, 1000)
    manager.save(blocks(1, 2), FIRST)
    (transfer,) = manager.flights.take_orders()
    assert transfer.move is Move.SAVE
    assert sorted(block.slot for block in transfer.blocks) == [0, 1]
    assert not manager.copied(key(1))
    assert manager.has(key(1), Tier.HOST, arriving=True)
    assert manager.host_free == 2
    manager.finished(done(transfer, 1), 0.0)
    manager.check()
    assert manager.where(key(1)) is Tier.HOST
    assert manager.where(key(2)) is None
    assert manager.host_free == 3
    assert (manager.moved[Move.SAVE], manager.failed[Move.SAVE]) == ((1, 0.5), 1)


def test_an_answer_is_taken_once_and_strangers_are_ignored() -> None:
    manager = TierManager(4, 0, 1000)
    manager.save(blocks(1), FIRST)
    (transfer,) = manager.flights.take_orders()
    assert manager.finished(TransferDone(99, (True,), 0.1), 0.0) is None
    assert manager.finished(done(transfer), 0.0) is transfer
    assert manager.finished(done(transfer, 0), 0.0) is None
    assert manager.copied(key(1))
    manager.check()


def test_what_is_there_or_coming_is_not_saved_again() -> None:
    manager = saved(4, 1)
    assert manager.save(blocks(1, 2), FIRST) == 2
    assert [block.key for order in manager.flights.take_orders() for block in order.blocks] == [key(2)]
    assert manager.save(blocks(1, 2), FIRST) == 2
    assert manager.flights.take_orders() == []


def test_large_orders_are_cut_so_that_urgent_ones_wait_little() -> None:
    manager = TierManager(100, 0, 1000)
    manager.save(blocks(*range(1, 71)), FIRST)
    assert [len(order.blocks) for order in manager.flights.take_orders()] == [
        MOST_BLOCKS,
        MOST_BLOCKS,
        70 - 2 * MOST_BLOCKS,
    ]


def test_a_run_ends_at_the_first_gap_and_mixes_tiers() -> None:
    manager = saved(4, 1, 2, 4, disk=4)
    manager.write(blocks(2, 4, pages=False), FIRST, 0.0)
    end(manager)
    manager.ranking = Worths(b1=(5.0, 0.0), b2=(0.0, 0.0), b4=(5.0, 0.0), b9=(9.0, 9.0))
    manager.save(blocks(8, 9), (1.0, 0.0))  # takes the free slot, and that of 2
    end(manager)
    assert manager.run([key(1), key(2), key(3), key(4)]) == [Tier.HOST, Tier.DISK]
    orders = manager.restore(blocks(1, 2), urgent=True)
    assert [(order.move, order.urgent) for order in orders] == [(Move.LOAD, True), (Move.FETCH, True)]
    assert orders[1].blocks[0].slot == -1
    with pytest.raises(ValueError, match="nowhere"):
        manager.restore(blocks(3), urgent=False)


def test_the_unowned_go_first_then_the_least_worth_and_never_for_less() -> None:
    manager = saved(3, 1, 2, 3)
    manager.ranking = Worths(b2=(1.0, 0.0), b3=(5.0, 0.0))
    manager.neglect(key(1))
    assert manager.save(blocks(4), (3.0, 0.0)) == 1
    end(manager)
    assert [manager.copied(key(n)) for n in (1, 2, 3, 4)] == [False, True, True, True]
    manager.ranking = Worths(b2=(1.0, 0.0), b3=(5.0, 0.0), b4=(3.0, 0.0))
    assert manager.save(blocks(5, 6), (3.0, 0.0)) == 1  # 2 goes, neither an equal nor a better one does
    end(manager)
    assert [manager.copied(key(n)) for n in (2, 3, 4, 5)] == [False, True, True, True]
    assert manager.evicted[Tier.HOST] == 2
    assert manager.lost == [key(1), key(2)]


def test_what_the_disk_has_too_leaves_the_host_before_what_nobody_else_has() -> None:
    manager = saved(3, 1, 2, 3, disk=10)
    manager.ranking = worths = Worths(_1=(1.0, 0.0), _2=(9.0, 0.0), _3=(0.0, 0.0))
    assert manager.write(blocks(2), FIRST, 0.0) == 1
    end(manager)
    assert manager.save(blocks(4), (2.0, 0.0)) == 1
    assert not manager.copied(key(3)), "what is worth nothing goes first"
    end(manager)
    assert manager.save(blocks(5), (2.0, 0.0)) == 1
    assert manager.where(key(2)) is Tier.DISK, "a copy is left of it, whatever it is worth"
    assert manager.where(key(1)) is Tier.HOST
    assert worths.rankings == 2, "once per time that there was no room"
    end(manager)
    assert manager.save(blocks(6), (0.5, 0.0)) == 0, "nothing goes for less than it is worth"


def test_what_a_transfer_reads_is_not_evicted() -> None:
    manager = saved(2, 1, 2)
    (load,) = manager.restore(blocks(1), urgent=True)
    manager.flights.take_orders()
    assert manager.save(blocks(3, 4), FIRST) == 1  # in the slot of 2
    manager.check()
    manager.finished(done(load), 0.0)
    assert manager.save(blocks(4), FIRST) == 1
    manager.check()


def test_a_bad_load_is_forgotten_when_its_last_reader_has_ended() -> None:
    manager = saved(2, 1, disk=2)
    first, second = manager.restore(blocks(1), urgent=True) + manager.restore(blocks(1), urgent=True)
    manager.flights.take_orders()
    manager.finished(done(first, 0), 0.0)
    manager.check()
    assert not manager.copied(key(1))
    assert manager.host_used == 1
    manager.finished(done(second, 0), 0.0)
    manager.check()
    assert manager.host_used == 0
    assert key(1) in manager.lost


def test_a_transfer_taken_back_loses_nothing() -> None:
    manager = saved(2, 1, disk=2)
    (load,) = manager.restore(blocks(1), urgent=True)
    manager.finished(done(load, cancelled=True), 0.0)
    assert manager.copied(key(1))
    manager.save(blocks(2), FIRST)
    manager.finished(done(manager.flights.take_orders()[-1], cancelled=True), 0.0)
    assert manager.host_used == 1
    assert manager.failed.get(Move.SAVE) == 0
    manager.check()


def test_the_disk_never_has_more_than_its_budget_drops_included() -> None:
    manager = saved(8, 1, 2, 3, disk=2)
    assert manager.write(blocks(1, 2, 3, pages=False), FIRST, 0.0) == 2
    end(manager)
    assert (manager.disk_blocks, manager.disk_free) == (2, 0)
    assert manager.write(blocks(3, pages=False), FIRST, 0.0) == 0  # its room is being made
    (drop,) = manager.flights.take_orders()
    assert (drop.move, [block.key for block in drop.blocks]) == (Move.DROP, [key(1)])
    assert manager.disk_used == 2 * STORED
    assert manager.where(key(1)) is Tier.HOST
    manager.finished(done(drop), 0.0)
    assert manager.write(blocks(3, pages=False), FIRST, 0.0) == 1
    manager.check()


def test_a_drop_that_failed_leaves_the_block_on_the_books() -> None:
    manager = saved(8, 1, 2, disk=1)
    manager.write(blocks(1, pages=False), FIRST, 0.0)
    end(manager)
    manager.write(blocks(2, pages=False), FIRST, 0.0)
    (drop,) = manager.flights.take_orders()
    manager.finished(done(drop, 0, error="EIO"), 0.0)
    manager.check()
    assert manager.disk_used == STORED
    assert manager.has(key(1), Tier.DISK)


def test_writes_pin_at_most_half_of_the_host() -> None:
    manager = saved(6, 1, 2, 3, 4, disk=9)
    assert manager.write(blocks(1, 2, 3, 4, pages=False), FIRST, 0.0) == 3
    manager.check()


def test_a_disk_that_fails_is_left_alone_for_a_while_and_says_why() -> None:
    manager = saved(6, 1, 2, disk=9)
    manager.write(blocks(1, pages=False), FIRST, 10.0)
    manager.finished(done(manager.flights.take_orders()[-1], 0, error="No space left on device"), 10.0)
    assert manager.health.error == "No space left on device"
    assert manager.disk_used == 0
    assert manager.write(blocks(1, pages=False), FIRST, 10.0 + DISK_PAUSE / 2) == 0
    assert manager.write(blocks(1, pages=False), FIRST, 10.0 + DISK_PAUSE) == 1
    end(manager)
    assert manager.health.error == ""


def test_what_the_disk_was_found_to_have_wrong_is_counted() -> None:
    manager = saved(6, 1, 2, disk=9)
    manager.write(blocks(1, 2, pages=False), FIRST, 0.0)
    end(manager)
    manager.clear()  # but for the disk's, whose drops are not told of yet
    (drop,) = manager.flights.take_orders()
    manager.finished(done(drop, 0, 1, error="EIO"), 0.0)
    assert manager.health.faults == {TierFault.UNWRITABLE: 1}
    (fetch,) = manager.restore(blocks(1, 2), urgent=True)
    manager.flights.take_orders()
    found = msgspec.structs.replace(done(fetch, 0, error="damaged"), faults=(TierFault.CORRUPT,))
    assert manager.finished(found, 0.0) is fetch
    assert manager.finished(found, 0.0) is None, "an answer to no open order counts nothing"
    assert manager.health.faults == {TierFault.UNWRITABLE: 1, TierFault.CORRUPT: 1}
    assert manager.health.error == "EIO"


def test_only_what_the_host_has_is_written() -> None:
    manager = saved(6, 1, disk=9)
    assert manager.write(blocks(1, 2, pages=False), FIRST, 0.0) == 1
    assert TierManager(6, 0, 1000).write(blocks(1), FIRST, 0.0) == 0


def test_entries_told_at_start_count_and_too_many_are_dropped() -> None:
    entries = [DiskEntry(key(n), 2000) for n in (1, 2, 3)]
    manager = TierManager(2, 4000, 1000, entries)
    assert manager.disk_used == 6000
    (drop,) = manager.flights.take_orders()
    assert [block.key for block in drop.blocks] == [key(1)]
    manager.finished(done(drop), 0.0)
    assert (manager.disk_used, manager.disk_blocks) == (4000, 2)
    assert TierManager(2, 0, 1000, entries).empty
    manager.check()


def test_the_queue_of_a_lane_is_what_a_transfer_would_wait() -> None:
    manager = saved(100, *range(1, 41), disk=50)
    manager.restore(blocks(1, 2), urgent=False)
    manager.restore(blocks(3), urgent=True)
    manager.write(blocks(4, pages=False), FIRST, 0.0)
    seconds = PRICES.seconds
    assert manager.flights.queue(PRICES, Tier.HOST) == seconds(PRICES.load, 2) + seconds(PRICES.load, 1)
    assert manager.flights.queue(PRICES, Tier.DISK) == seconds(PRICES.write, 1)
    # An urgent one passes what is not, but for the one that may be under way.
    manager.restore(blocks(*range(5, 41)), urgent=False)
    urgent = manager.flights.queue(PRICES, Tier.HOST, urgent=True)
    assert urgent == pytest.approx(seconds(PRICES.load, 1) + seconds(PRICES.load, MOST_BLOCKS))


def test_clear_forgets_all_that_no_transfer_needs() -> None:
    manager = saved(6, 1, 2, disk=9)
    manager.write(blocks(1, pages=False), FIRST, 0.0)
    end(manager)
    (load,) = manager.restore(blocks(2), urgent=True)
    assert manager.flights.take_orders() == [load]
    manager.clear()
    manager.check()
    assert (manager.where(key(1)), manager.where(key(2))) == (None, Tier.HOST)
    manager.finished(done(load), 0.0)
    manager.clear()
    end(manager)
    assert manager.empty


def test_sizes_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        TierManager(-1, 0, 1000)
