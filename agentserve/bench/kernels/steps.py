"""Whole steps: decode, prefill, rows that share a prefix, and what a step costs outside kernels."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from agentserve.bench.kernels.attention import attention_run
from agentserve.bench.kernels.costs import Demand
from agentserve.bench.kernels.scene import Scene
from agentserve.bench.kernels.subject import Variant
from agentserve.bench.kernels.timing import Run, Stopwatch, Timed
from agentserve.bench.report import Row
from agentserve.core.plan import Plan

OVERHEAD_MS = 1.0  # what a step may spend outside kernels


def step(variant: Variant, plan: Plan) -> tuple[float, float]:
    """Run one plan: its seconds, and how many of them were outside the backend's calls."""
    inside = variant.clock.seconds
    began = time.perf_counter()
    result = variant.executor.run(plan)
    total = time.perf_counter() - began
    for chunk in result.chunks:
        if chunk.error:
            raise ValueError(f"{variant.name}: {chunk.error}")
    return total, total - (variant.clock.seconds - inside)


def running(variant: Variant, plans: Sequence[Plan]) -> Run:
    return lambda: sum(step(variant, plan)[0] for plan in plans)


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Measures whole steps of all variants in alternation."""

    scene: Scene
    variants: Sequence[Variant]
    watch: Stopwatch

    def decode(self, rows: int, context: int) -> list[Row]:
        """A step of one token per row: batch, forward pass, logits, greedy sampling."""
        plan = self.scene.plan(self.scene.decode(rows, context))
        times = self._alternate([plan])
        name = f"{rows} x {context:,} tokens"
        return [
            times[one.name].row("decode step", name, one.costs.decode([context] * rows), one.name)
            for one in self.variants
        ]

    def prefill(self, tokens: int, chunk: int | None = None) -> list[Row]:
        """A prompt from nothing to its first sampled token."""
        parts = self.scene.prefill(tokens, chunk)
        plans = [self.scene.plan(one, sample=one is parts[-1]) for one in parts]
        times = self._alternate(plans, warm=tokens < 1024)
        name = f"{tokens:,} tokens" + (f" in chunks of {chunk}" if chunk else "")
        return [
            times[one.name].rate_row("prefill", name, one.costs.prefill(tokens), tokens, one.name)
            for one in self.variants
        ]

    def sharing(self, rows: int, prefix: int, own: int) -> list[Row]:
        """Rows whose contexts begin with the same pages, against the same with pages of their own."""
        name = f"{rows} x ({prefix:,} shared + {own})"
        contexts, found = [prefix + own] * rows, []
        apart = self.scene.decode(rows, prefix + own)
        together = self.scene.decode(rows, prefix + own, prefix)
        for one in self.variants:
            pair = self.watch.alternate(
                {
                    "apart": running(one, [self.scene.plan(apart)]),
                    "together": running(one, [self.scene.plan(together)]),
                }
            )
            limits = (one.costs.decode(contexts), one.costs.decode(contexts, prefix))
            found += _compared(f"step, {name}", pair, limits, one.name)
        first = self.variants[0]
        pair = self.watch.alternate(
            {
                "apart": attention_run(first.decoder, self.scene, apart),
                "together": attention_run(first.decoder, self.scene, together),
            }
        )
        limits = (first.costs.attention_step(contexts), first.costs.attention_step(contexts, prefix))
        return found + _compared(f"attention, {name}", pair, limits, "")

    def overhead(self, rows: int, context: int) -> Row:
        """Milliseconds of a decode step outside the backend's forward pass and logits: checking the plan,
        laying out the batch, tensors, greedy sampling, results."""
        plan, first = self.scene.plan(self.scene.decode(rows, context)), self.variants[0]
        runs = [seconds * 1e3 for seconds in self.watch.alone(lambda: step(first, plan)[1]).seconds]
        name = f"{rows} x {context:,} tokens"
        return Row(
            name,
            statistics.median(runs),
            "ms",
            OVERHEAD_MS,
            "1 ms",
            runs=tuple(runs),
            group="outside kernels",
        )

    def _alternate(self, plans: Sequence[Plan], warm: bool = True) -> dict[str, Timed]:
        return self.watch.alternate(
            {variant.name: running(variant, plans) for variant in self.variants}, warm
        )


def _compared(name: str, pair: dict[str, Timed], demands: tuple[Demand, Demand], variant: str) -> list[Row]:
    """Both ways, and how many times faster sharing is: each round's own ratio, and their median."""
    apart, together = pair["apart"], pair["together"]
    ratios = tuple(slow / fast for slow, fast in zip(apart.seconds, together.seconds, strict=True))
    return [
        apart.row("shared prefix", f"{name}: pages of their own", demands[0], variant),
        together.row("shared prefix", f"{name}: pages shared", demands[1], variant),
        Row(
            f"{name}: gain", statistics.median(ratios), "x",
            higher_is_better=True, runs=ratios, group="shared prefix", variant=variant,
        ),
    ]  # fmt: skip
