"""Charts are well-formed SVG whose points lie where their values are."""

from __future__ import annotations

import math
from xml.etree import ElementTree

from agentserve.sim.shootout.plots import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, chart

SVG = "{http://www.w3.org/2000/svg}"


def points(svg: str) -> list[list[tuple[float, float]]]:
    found = []
    for line in ElementTree.fromstring(svg).iter(f"{SVG}polyline"):
        pairs = [pair.split(",") for pair in line.attrib["points"].split()]
        found.append([(float(x), float(y)) for x, y in pairs])
    return found


def test_larger_values_are_further_right_and_higher() -> None:
    svg = chart("t", "y", {"a": [(1, 0.5), (2, 1.0), (4, 2.0)]})
    (line,) = points(svg)
    xs, ys = [x for x, _ in line], [y for _, y in line]
    assert xs == sorted(xs)
    assert ys == sorted(ys, reverse=True)
    assert xs[1] - xs[0] == xs[2] - xs[1]  # a logarithmic scale
    assert all(LEFT <= x <= WIDTH - RIGHT and TOP <= y <= HEIGHT - BOTTOM for x, y in line)


def test_names_are_escaped_and_every_line_has_one() -> None:
    svg = chart("<t> & more", "y", {"<a>": [(1, 1)], "b": [(1, 2)]})
    texts = [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert {"<t> & more", "<a>", "b"} <= set(texts)
    assert len(points(svg)) == 2


def test_what_cannot_be_drawn_is_left_out() -> None:
    svg = chart("t", "y", {"a": [(1, 0.0), (2, 5.0), (4, math.inf), (8, math.nan)]}, log_y=True)
    assert [len(line) for line in points(svg)] == [1]
    assert points(chart("t", "y", {"a": []})) == [[]]
    assert points(chart("t", "y", {"a": [(1, 0.0)]})) != [[]]
