"""Whole steps: decode, prefill, rows that share a prefix, and what a step costs outside kernels."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from agentserve.bench.kernels.attention import attention_run
from agentserve.bench.kernels.cases import Case
from agentserve.bench.kernels.costs import Demand
from agentserve.bench.kernels.scene import Scene
from agentserve.bench.kernels.sizes import Sizes
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

    def cases(self, sizes: Sizes) -> Iterator[Case]:
        """All whole steps; the longest last, as they are what time may not suffice for."""
        for context in sizes.contexts:
            for rows in sizes.decoded:
                yield self._case("decode step", partial(self.decode, rows, context), rows, context)
        for context in sizes.alone:
            yield self._case("decode step", partial(self.decode, 1, context), 1, context)
        if sizes.sharing:
            rows, prefix, own = sizes.sharing
            yield self._case("shared prefix", partial(self.sharing, rows, prefix, own), rows, prefix + own)
        if self.variants[0].clock.seconds:
            for rows in sizes.overhead:
                for context in sizes.contexts[:2]:
                    yield self._case("outside kernels", partial(self.overhead, rows, context), rows, context)
        prompts: list[tuple[int, int | None]] = [(tokens, None) for tokens in sizes.prefilled]
        prompts += [(tokens, sizes.chunk) for tokens in sizes.chunked]
        for tokens, chunk in sorted(prompts, key=lambda prompt: prompt[0]):
            name = f"{tokens:,} tokens" + (f" in chunks of {chunk}" if chunk else "")
            yield Case("prefill", name, partial(self.prefill, name, tokens, chunk))

    def _case(self, group: str, measure: Callable[[], list[Row]], rows: int, context: int) -> Case:
        return Case(group, f"{rows} x {context:,} tokens", measure, self.scene.fits(rows, context + 1))

    def decode(self, rows: int, context: int) -> list[Row]:
        """A step of one token per row: batch, forward pass, logits, greedy sampling."""
        plan = self.scene.plan(self.scene.decode(rows, context))
        times = self._alternate([plan])
        name = f"{rows} x {context:,} tokens"
        return [
            times[one.name].row("decode step", name, one.costs.decode([context] * rows), one.name)
            for one in self.variants
        ]

    def prefill(self, name: str, tokens: int, chunk: int | None = None) -> list[Row]:
        """A prompt from nothing to its first sampled token."""
        parts = self.scene.prefill(tokens, chunk)
        plans = [self.scene.plan(one, sample=one is parts[-1]) for one in parts]
        times = self._alternate(plans, warm=tokens < 1024)
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
        return found + _compared(f"attention, {name}", pair, limits, first.name)

    def overhead(self, rows: int, context: int) -> list[Row]:
        """Milliseconds of a decode step outside the backend's forward pass and logits: checking the plan,
        laying out the batch, tensors, greedy sampling, results."""
        plan, first = self.scene.plan(self.scene.decode(rows, context)), self.variants[0]
        runs = [seconds * 1e3 for seconds in self.watch.alone(lambda: step(first, plan)[1]).seconds]
        name, value = f"{rows} x {context:,} tokens", statistics.median(runs)
        return [Row(name, value, "ms", OVERHEAD_MS, "1 ms", runs=tuple(runs), group="outside kernels")]

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
