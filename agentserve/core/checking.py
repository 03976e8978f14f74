"""What holds between the queues, the session table and the pages of an engine core. For tests."""

from __future__ import annotations

from agentserve.core.ahead import Ahead
from agentserve.core.kv import KVManager
from agentserve.core.scheduler import Scheduler
from agentserve.core.session import SessionTable
from agentserve.core.states import Phase


def check_queues(sessions: SessionTable, scheduler: Scheduler, kv: KVManager, ahead: Ahead) -> None:
    """Raise AssertionError if an invariant is broken (INVARIANTS.md)."""
    running, waiting = scheduler.running, scheduler.waiting
    for session in sessions:
        queued = sum(session is other for other in running) + sum(session is other for other in waiting)
        assert queued == (session.turn is not None), f"{session.id} is queued {queued} times"
        assert 0 <= session.computed <= len(session.tokens), f"{session.id}: computed out of range"
        if session.phase is Phase.RUNNING:
            held = kv.blocks_of(session.id) * kv.page_size
            assert session.computed <= held, f"{session.id}: computed without pages"
        elif not ahead.flying(session.id):
            assert not kv.blocks_of(session.id), f"{session.id} holds pages at rest"
    line = list(scheduler.policy.order.line(scheduler.seen))
    assert len(line) == len({session.id for session in line}), "a turn stands in line twice"
    assert all(session in waiting for session in line), "a turn stands in line that does not wait"
    assert bool(line) == bool(waiting), "turns wait, but nobody stands in line"
    ahead.check()
    if not running and not ahead.any_flying:
        kept = kv.moving + kv.copied
        assert all(pool.live <= kept for pool in kv.pools), "pages are live but nobody runs or moves them"
