"""Prometheus metrics of the tiers and of waits for tools; a part of `agentserve.metrics`.

Workers report totals that only grow. Each counter here is raised to the sum of them and never lowered:
a worker that dies or says nothing for a while takes nothing back. Tool names come from clients, so only
the first `MOST_TOOLS` of them get a label of their own; the others share one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from agentserve.messages import TiersView, WorkerView
from tiering.policy.base import Choice
from tiering.types import Move, Tier, TierFault

MOST_TOOLS = 50  # label values
LONGEST_NAME = 64  # characters of a label
OTHER = "(other)"
_WAYS = {"in": (Move.LOAD, Move.FETCH, Move.BORROW), "out": (Move.SAVE,)}
_WAITS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 3600)


class Totals:
    """A counter that follows totals which somebody else counts."""

    def __init__(
        self, name: str, text: str, label: str, registry: CollectorRegistry, known: Sequence[str] = ()
    ) -> None:
        self._counter = Counter(name, text, [label], registry=registry)
        self._seen: dict[str, float] = {}
        for value in known:
            self._counter.labels(value)  # shown as 0 from the start

    def follow(self, totals: Mapping[str, float]) -> None:
        for name, total in totals.items():
            grown = total - self._seen.get(name, 0.0)
            if grown > 0:
                self._counter.labels(name).inc(grown)
                self._seen[name] = total


class ToolLabels:
    """Names of tools as label values, bounded in number and length."""

    def __init__(self, most: int = MOST_TOOLS) -> None:
        self._most = most
        self._known: set[str] = set()

    def of(self, tool: str) -> str:
        # What cannot be printed cannot always be encoded either, and one such label would break them all.
        name = "".join(sign if sign.isprintable() else "?" for sign in tool[:LONGEST_NAME])
        if name not in self._known:
            if len(self._known) >= self._most:
                return OTHER
            self._known.add(name)
        return name


class TierMetrics:
    """What operators see of tiers. All methods are cheap and never raise."""

    def __init__(self, registry: CollectorRegistry) -> None:
        tiers, moves = [tier.value for tier in Tier], [move.value for move in Move]

        def gauge(name: str, text: str, labels: Sequence[str] = ("tier",)) -> Gauge:
            return Gauge(f"agentserve_tier_{name}", text, labels, registry=registry)

        def totals(name: str, text: str, label: str, known: Sequence[str]) -> Totals:
            return Totals(f"agentserve_tier_{name}", text, label, registry, known)

        self._blocks = gauge("blocks", "Blocks of KV in a tier")
        self._capacity = gauge("capacity_blocks", "Blocks that a tier can hold")
        self._bytes = gauge("bytes", "Bytes of KV in a tier, as stored")
        self._budget = gauge("capacity_bytes", "Bytes that a tier may hold")
        for tier in tiers:
            for made in (self._blocks, self._capacity, self._bytes, self._budget):
                made.labels(tier)
        self._moving = gauge("moving_blocks", "Blocks in transfers now", ())
        self._pinned = gauge("pinned_pages", "Device pages that transfers pin now", ())
        self._failing = gauge("disk_failing_workers", "Workers that cannot use their disk now", ())
        self._hits = totals("hit_tokens", "Prompt tokens whose KV was found in a tier", "tier", tiers)
        self._moved = totals("moved_blocks", "Blocks moved between tiers", "move", moves)
        self._volume = totals("moved_bytes", "Bytes of KV moved between tiers, uncompressed", "move", moves)
        self._swapped = Totals(
            "agentserve_swap_bytes",
            "Bytes of KV that came onto the device and left it, uncompressed",
            "direction",
            registry,
            ["in", "out"],
        )
        self._seconds = totals("move_seconds", "Time spent moving, without waiting", "move", moves)
        self._failed = totals("failed_blocks", "Blocks that could not be moved", "move", moves)
        self._evicted = totals("evicted_blocks", "Blocks that made room for others", "tier", tiers)
        kinds = [fault.value for fault in TierFault]
        self._faults = totals("faults", "What was found wrong below the device, each once", "fault", kinds)
        choices = [choice.value for choice in Choice]
        self._decisions = totals("decisions", "What the policy chose for sessions at rest", "choice", choices)
        self._ahead = Totals(
            "agentserve_ahead_tokens",
            "Prompt tokens computed while a tool's output arrived, and of these those that a turn began with",
            "what",
            registry,
            ["computed", "used"],
        )
        self._takeovers = Counter(
            "agentserve_tier_policy_takeovers",
            "Times that the plain policy took over because it did better",
            registry=registry,
        )
        self._takeovers_seen = 0
        self._labels = ToolLabels()
        self._wait = Histogram(
            "agentserve_tool_wait_seconds",
            "From a tool call's hand-over to its result",
            ["tool"],
            buckets=_WAITS,
            registry=registry,
        )
        self._ended = Totals(
            "agentserve_tool_waits_predicted", "Ended waits that had been predicted", "tool", registry
        )
        self._median = Totals(
            "agentserve_tool_waits_within_median",
            "Of these, ended by the predicted median; half of them when predictions are right",
            "tool",
            registry,
        )
        self._p90 = Totals(
            "agentserve_tool_waits_within_p90",
            "Of these, ended by the predicted 90th percentile",
            "tool",
            registry,
        )

    def waited(self, tool: str, seconds: float) -> None:
        """A tool's result has come, `seconds` after its call was handed out."""
        self._wait.labels(self._labels.of(tool)).observe(max(seconds, 0.0))

    def set_workers(self, workers: Sequence[WorkerView]) -> None:
        """workers: their last views, counters as totals over all that ran in each place."""
        views = [(worker, worker.tiers) for worker in workers if worker.tiers is not None]
        self._set_sizes(views)
        tiers = [view for _, view in views]
        self._moving.set(sum(view.moving for view in tiers))
        self._pinned.set(sum(view.pinned for view in tiers))
        self._failing.set(sum(bool(view.disk_error) for view in tiers))
        self._hits.follow(_sum(view.hit_tokens for view in tiers))
        self._moved.follow(_sum({name: n for name, (n, _) in view.moved.items()} for view in tiers))
        self._volume.follow(
            _sum({name: n * view.block_bytes for name, (n, _) in view.moved.items()} for view in tiers)
        )
        self._swapped.follow(
            {
                way: sum(
                    view.moved.get(move.value, (0, 0.0))[0] * view.block_bytes
                    for move in moves
                    for view in tiers
                )
                for way, moves in _WAYS.items()
            }
        )
        self._seconds.follow(_sum({name: s for name, (_, s) in view.moved.items()} for view in tiers))
        self._failed.follow(_sum(view.failed for view in tiers))
        self._evicted.follow(_sum(view.evicted for view in tiers))
        self._faults.follow(_sum(view.faults for view in tiers))
        self._decisions.follow(_sum(view.decisions for view in tiers))
        self._ahead.follow(
            {
                "computed": sum(worker.ahead.computed for worker in workers),
                "used": sum(worker.ahead.used for worker in workers),
            }
        )
        grown = sum(view.takeovers for view in tiers) - self._takeovers_seen
        if grown > 0:
            self._takeovers.inc(grown)
            self._takeovers_seen += grown
        for index, counter in enumerate((self._ended, self._median, self._p90)):
            counter.follow(
                _sum(
                    {self._labels.of(tool): counts[index]}
                    for view in tiers
                    for tool, counts in view.waits.items()
                )
            )

    def _set_sizes(self, views: Sequence[tuple[WorkerView, TiersView]]) -> None:
        device, host, disk = Tier.DEVICE.value, Tier.HOST.value, Tier.DISK.value
        filled = {
            device: [(worker.pages_live + worker.pages_cached, tiers) for worker, tiers in views],
            host: [(tiers.host, tiers) for _, tiers in views],
        }
        room = {
            device: [(worker.pages, tiers) for worker, tiers in views],
            host: [(tiers.host_slots, tiers) for _, tiers in views],
        }
        for tier in (device, host):
            self._blocks.labels(tier).set(sum(n for n, _ in filled[tier]))
            self._bytes.labels(tier).set(sum(n * tiers.block_bytes for n, tiers in filled[tier]))
            self._capacity.labels(tier).set(sum(n for n, _ in room[tier]))
            self._budget.labels(tier).set(sum(n * tiers.block_bytes for n, tiers in room[tier]))
        self._blocks.labels(disk).set(sum(tiers.disk for _, tiers in views))
        self._bytes.labels(disk).set(sum(tiers.disk_bytes for _, tiers in views))
        self._capacity.labels(disk).set(
            sum(tiers.disk_budget // tiers.block_bytes for _, tiers in views if tiers.block_bytes)
        )
        self._budget.labels(disk).set(sum(tiers.disk_budget for _, tiers in views))


def _sum(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Amounts of the same name added up."""
    found: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            found[name] = found.get(name, 0) + amount
    return found
