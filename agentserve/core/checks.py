"""What is always true of a core between two calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentserve.core.states import Phase

if TYPE_CHECKING:
    from agentserve.core.engine import EngineCore


def check(core: EngineCore) -> None:
    """Raise AssertionError if any invariant is broken (INVARIANTS.md). For tests: O(pages)."""
    core.kv.check()
    running, waiting = core.scheduler.running, core.scheduler.waiting
    for session in core.sessions:
        queued = sum(session is other for other in running) + sum(session is other for other in waiting)
        assert queued == (session.turn is not None), f"{session.id} is queued {queued} times"
        assert 0 <= session.computed <= len(session.tokens), f"{session.id}: computed out of range"
        if session.phase is Phase.RUNNING:
            held = core.kv.blocks_of(session.id) * core.config.page_size
            assert session.computed <= held, f"{session.id}: computed without pages"
        elif not core.ahead.flying(session.id):
            assert not core.kv.blocks_of(session.id), f"{session.id} holds pages at rest"
    line = list(core.scheduler.policy.order.line(core.scheduler.seen))
    assert len(line) == len({session.id for session in line}), "a turn stands in line twice"
    assert all(session in waiting for session in line), "a turn stands in line that does not wait"
    assert bool(line) == bool(waiting), "turns wait, but nobody stands in line"
    core.ahead.check()
    if not running and not core.ahead.any_flying:
        kept = core.kv.moving + core.kv.copied
        assert all(pool.live <= kept for pool in core.kv.pools), (
            "pages are live but nobody runs or moves them"
        )
    if core.tiers is not None:
        core.tiers.check()
