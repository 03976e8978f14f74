"""Prices: what moving a block and computing a token cost, measured online.

Each move is a line, seconds = fixed + per block x blocks, fitted by least squares over decaying sums.
Start values count as a few pseudo-observations, so that an estimate exists at once and fades as
measurements come. A measurement far from what was predicted is pulled in before it counts: one
stalled copy moves a price a little, a lasting change moves it in a few steps. Coefficients are never
negative, so more never costs less. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations

import msgspec

from tiering.policy.base import Prices
from tiering.types import Move

_TINY = 1e-12


class PriceSettings(msgspec.Struct, frozen=True):
    memory: float = 64.0  # measurements after which an old one has faded to 1/e
    prior_weight: float = 2.0  # measurements that each start value counts as
    outlier: float = 4.0  # a measurement counts as at most this many times (or this part of) the predicted
    least_tokens: int = 16  # steps whose chunks are all shorter say nothing about prefill


class Fit:
    """Non-negative, robust, decaying least squares of a few coefficients; the first goes with 1.

    Errors are taken relative to the start values: small and large moves count alike.
    """

    def __init__(
        self, start: Sequence[float], points: Iterable[Sequence[float]], settings: PriceSettings
    ) -> None:
        """start: coefficients; points: the inputs at which they are believed."""
        self._settings = settings
        self._size = len(start)
        self._xx = [[0.0] * self._size for _ in start]
        self._xy = [0.0] * self._size
        self.coefficients = tuple(max(value, 0.0) if math.isfinite(value) else 0.0 for value in start)
        self._start = self.coefficients
        for point in points:
            self._add(point, self.predict(point), settings.prior_weight)

    def predict(self, point: Sequence[float]) -> float:
        return sum(c * x for c, x in zip(self.coefficients, point, strict=True))

    def measured(self, point: Sequence[float], seconds: float) -> None:
        """One measurement; what cannot be one (not finite, negative) changes nothing."""
        if not (math.isfinite(seconds) and seconds >= 0):
            return
        predicted, most = self.predict(point), self._settings.outlier
        if predicted > _TINY:
            seconds = min(max(seconds, predicted / most), predicted * most)
        keep = 1.0 - 1.0 / self._settings.memory
        for i in range(self._size):
            self._xy[i] *= keep
            for j in range(self._size):
                self._xx[i][j] *= keep
        self._add(point, seconds, 1.0)
        self.coefficients = self._solve()

    def _add(self, point: Sequence[float], seconds: float, weight: float) -> None:
        # By the start values, which never change: what was slow must not count less for it.
        expected = sum(c * x for c, x in zip(self._start, point, strict=True))
        weight /= (expected if expected > _TINY else max(point)) ** 2
        for i in range(self._size):
            self._xy[i] += weight * point[i] * seconds
            for j in range(self._size):
                self._xx[i][j] += weight * point[i] * point[j]

    def _solve(self) -> tuple[float, ...]:
        """The best non-negative coefficients: of all subsets that may be non-zero, the best feasible."""
        best, least = self.coefficients, math.inf
        for size in range(1, self._size + 1):
            for chosen in combinations(range(self._size), size):
                values = self._solve_for(chosen)
                if values is None:
                    continue
                error = self._error(values)
                if error < least:
                    best, least = values, error
        return best

    def _solve_for(self, chosen: tuple[int, ...]) -> tuple[float, ...] | None:
        """Least squares over the chosen coefficients; None if undetermined or one is negative."""
        # Scaled to a unit diagonal: inputs differ by many orders of magnitude.
        scale = [math.sqrt(self._xx[i][i]) for i in chosen]
        if min(scale) <= 0:
            return None
        rows = [
            [self._xx[i][j] / (scale[a] * scale[b]) for b, j in enumerate(chosen)] + [self._xy[i] / scale[a]]
            for a, i in enumerate(chosen)
        ]
        solution = eliminate(rows)
        if solution is None or min(solution) < 0:
            return None
        values = [0.0] * self._size
        for a, i in enumerate(chosen):
            values[i] = solution[a] / scale[a]
        return tuple(values)

    def _error(self, values: Sequence[float]) -> float:
        """The sum of squares, less what is the same for all."""
        rows = range(self._size)
        quadratic = sum(values[i] * self._xx[i][j] * values[j] for i in rows for j in rows)
        return quadratic - 2 * sum(values[i] * self._xy[i] for i in rows)


def eliminate(rows: list[list[float]]) -> list[float] | None:
    """Solve a small linear system given as rows of [coefficients..., right side]; None if singular."""
    size = len(rows)
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(rows[row][column]))
        if abs(rows[pivot][column]) < 1e-9:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for row in range(column + 1, size):
            factor = rows[row][column] / rows[column][column]
            for i in range(column, size + 1):
                rows[row][i] -= factor * rows[column][i]
    solution = [0.0] * size
    for row in reversed(range(size)):
        known = sum(rows[row][i] * solution[i] for i in range(row + 1, size))
        solution[row] = (rows[row][size] - known) / rows[row][row]
    return solution


class PriceBook:
    """The owner of prices. Give it start values; tell it what was measured."""

    def __init__(self, start: Prices, settings: PriceSettings | None = None) -> None:
        settings = settings or PriceSettings()
        if not (settings.memory > 1 and settings.prior_weight > 0 and settings.outlier > 1):
            raise ValueError("prices need a memory and an outlier bound above 1 and a positive prior weight")
        self._start = start
        self._settings = settings
        few = ((1.0, 1.0), (1.0, 64.0))
        lines = {
            Move.SAVE: start.save,
            Move.LOAD: start.load,
            Move.WRITE: start.write,
            Move.FETCH: start.fetch,
        }
        self._moves = {move: Fit(line, few, settings) for move, line in lines.items()}
        chunks = ((0, 16), (0, 512), (4096, 512))
        self._told: tuple[float, float, float] | None = None  # by `predicted`
        self._prefill = Fit(start.prefill, [_work((chunk,)) for chunk in chunks], settings)
        self._prices = self._read()

    def prices(self) -> Prices:
        return self._prices

    def moved(self, move: Move, blocks: int, seconds: float) -> None:
        """`blocks` blocks were moved in `seconds`, without waiting in queues. Dropping has no price."""
        fit = self._moves.get(move)
        if fit is None or blocks <= 0:
            return
        fit.measured((1.0, float(blocks)), seconds)
        self._prices = self._read()

    def stepped(self, chunks: Iterable[tuple[int, int]], seconds: float) -> None:
        """A step with these chunks, each (start, tokens), took `seconds`."""
        chunks = tuple(chunks)
        if max((count for _, count in chunks), default=0) < self._settings.least_tokens:
            return  # however many sessions decode in it
        self._prefill.measured(_work(chunks), seconds)
        self._prices = self._read()

    def predicted(self, prefill: tuple[float, float, float]) -> None:
        """Computing costs this: (fixed, per token, per pair), by a model of steps that is kept elsewhere."""
        if prefill != self._prices.prefill:
            self._prices = msgspec.structs.replace(self._prices, prefill=prefill)
            self._told = prefill

    def _read(self) -> Prices:
        def line(move: Move) -> tuple[float, float]:
            fixed, per_block = self._moves[move].coefficients
            return fixed, per_block

        fixed, per_token, per_pair = self._prefill.coefficients
        return Prices(
            block_bytes=self._start.block_bytes,
            save=line(Move.SAVE),
            load=line(Move.LOAD),
            write=line(Move.WRITE),
            fetch=line(Move.FETCH),
            prefill=self._told or (fixed, per_token, per_pair),
            page_size=self._start.page_size,
        )


def _work(chunks: Iterable[tuple[int, int]]) -> tuple[float, float, float]:
    """(1, tokens, pairs attended) of a step."""
    tokens = pairs = 0
    for start, count in chunks:
        if count > 0 <= start:
            tokens += count
            pairs += count * start + count * (count + 1) // 2
    return 1.0, float(tokens), float(pairs)


def starting_prices(
    block_bytes: int,
    page_size: int,
    *,
    copy_rate: float = 4e9,
    write_rate: float = 0.5e9,
    fetch_rate: float = 1e9,
    prefill: tuple[float, float, float] = (5e-3, 1e-3, 1e-8),
) -> Prices:
    """Cautious prices until there are measured ones: rates in bytes per second of one core's copies
    and of a plain SSD; prefill (fixed, per token, per pair) as of a small model on a CPU."""
    if block_bytes <= 0 or page_size <= 0 or min(copy_rate, write_rate, fetch_rate) <= 0:
        raise ValueError("block size, page size and rates must be positive")
    copy = (1e-4, block_bytes / copy_rate)
    return Prices(
        block_bytes=block_bytes,
        save=copy,
        load=copy,
        write=(1e-3, block_bytes / write_rate),
        fetch=(1e-3, block_bytes / fetch_rate),
        prefill=prefill,
        page_size=page_size,
    )
