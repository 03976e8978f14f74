"""Line charts as SVG, with nothing but text: one line per policy over what was varied."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 40, 48
COLOURS = ("#1b6ac9", "#d1495b", "#2e8b57", "#8e5ea2", "#e08e0b", "#4a4e69", "#00897b", "#c2185b", "#6d4c41")

Points = Sequence[tuple[float, float]]


def chart(
    title: str,
    y_title: str,
    lines: Mapping[str, Points],
    *,
    log_y: bool = False,
    x_title: str = "oversubscription of the device pool",
    x_unit: str = "×",
) -> str:
    """An SVG document. x is on a logarithmic scale of base 2; points that have no place on a logarithmic
    y scale (0 and less) are left out. Without any point there is only the frame."""
    kept = {
        name: [(x, y) for x, y in points if x > 0 and math.isfinite(y) and (y > 0 or not log_y)]
        for name, points in lines.items()
    }
    xs = sorted({x for points in kept.values() for x, _ in points}) or [1.0]
    ys = [y for points in kept.values() for _, y in points] or [1.0]
    low, high = (min(ys) / 1.2, max(ys) * 1.2) if log_y else (0.0, max(max(ys) * 1.08, 1e-9))
    axis_y = _Scale(low, high, HEIGHT - BOTTOM, TOP, log=log_y)
    span = (xs[0], xs[-1]) if xs[0] < xs[-1] else (xs[0] / 2, xs[0] * 2)
    axis_x = _Scale(*span, LEFT, WIDTH - RIGHT, log=True)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 22, title, size=15),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_title, anchor="middle"),
        f'<text transform="translate(16 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" '
        f'text-anchor="middle">{escape(y_title)}</text>',
    ]
    for y in _ticks(low, high, log=log_y):
        at = axis_y(y)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 6, at + 4, f"{y:.3g}", anchor="end"))
    parts += [_text(axis_x(x), HEIGHT - BOTTOM + 18, f"{x:g}{x_unit}", anchor="middle") for x in xs]
    for number, (name, points) in enumerate(kept.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [(axis_x(x), axis_y(y)) for x, y in points]
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        below = TOP + 10 + 18 * number
        parts.append(f'<path d="M{WIDTH - RIGHT + 12} {below}h18" stroke="{colour}" stroke-width="3"/>')
        parts.append(_text(WIDTH - RIGHT + 36, below + 4, name))
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Scale:
    def __init__(self, low: float, high: float, begin: float, end: float, *, log: bool) -> None:
        self._map = math.log if log else float
        self._low, self._high = self._map(low), self._map(high)
        self._begin, self._end = begin, end

    def __call__(self, value: float) -> float:
        share = (self._map(value) - self._low) / ((self._high - self._low) or 1.0)
        return self._begin + share * (self._end - self._begin)


def _ticks(low: float, high: float, *, log: bool) -> list[float]:
    """At most a handful of round values between low and high."""
    if log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        ticks = [10.0**power * step for power in range(first, last + 1) for step in (1, 3)]
        return [tick for tick in ticks if low <= tick <= high]
    step = 10.0 ** math.floor(math.log10(high / 2))
    step = next(each for each in (step, 2 * step, 5 * step) if high / each <= 6)
    return [step * number for number in range(int(high / step) + 1)]


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
