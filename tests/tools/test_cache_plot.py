"""The charts of cache-sim: valid SVG, points where they belong, axes and legend that say what is shown."""

import math
import re
from xml.etree import ElementTree

import pytest

from ds41rt.tools.cache_plot import Panel, line_charts, nice_ticks

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (3000, 8000, [3000, 4000, 5000, 6000, 7000, 8000]),
        (80.8, 96.1, [80, 85, 90, 95, 100]),
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.31, 0.34, [0.31, 0.32, 0.33, 0.34]),
        (0, 0, [0, 0.2]),
        (-3, 7, [-4, -2, 0, 2, 4, 6, 8]),
    ],
)
def test_ticks_are_round_and_enclose(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high) == pytest.approx(ticks)


@pytest.mark.parametrize("value", [1e-9, 0.3, 5.0, 123456.0, -2.0])
def test_ticks_of_one_value(value: float) -> None:
    ticks = nice_ticks(value, value)
    assert 2 <= len(ticks) <= 7
    assert ticks[0] <= value <= ticks[-1]


def chart() -> ElementTree.Element:
    lines = {"lru": [(3000, 80.0), (5000, 90.0), (8000, 96.0)], "a < b & c": [(3000, 84.0), (5000, 92.0), (8000, 97.0)]}
    times = {"lru": [(3000, 450.0), (8000, 100.0)], "a < b & c": [(5000, 200.0)]}
    panels = [Panel("Hits", "device slots", "hit rate in %", lines), Panel("Time", "device slots", "ms a token", times)]
    return ElementTree.fromstring(line_charts('Title "x" <y>', panels))


def test_everything_is_labelled() -> None:
    texts = [t.text for t in chart().iter(f"{SVG}text")]
    for text in ('Title "x" <y>', "Hits", "Time", "hit rate in %", "ms a token", "lru", "a < b & c", "3,000", "8,000"):
        assert text in texts
    assert texts.count("device slots") == 2


def test_points_lie_on_the_scale_of_the_axis() -> None:
    root = chart()
    places = {
        t.text: (float(t.attrib["x"]), float(t.attrib["y"]) - 4) for t in root.iter(f"{SVG}text") if "x" in t.attrib
    }
    lines = [
        [tuple(map(float, p.split(","))) for p in line.attrib["points"].split()] for line in root.iter(f"{SVG}polyline")
    ]
    assert [len(line) for line in lines] == [3, 3, 2, 1]
    assert len(list(root.iter(f"{SVG}circle"))) == 9
    # (3000, 80) and (5000, 90) of the first line, by the places of the labels of its axes
    assert lines[0][0][1] == pytest.approx(places["80"][1], abs=0.2)
    assert lines[0][1][1] == pytest.approx(places["90"][1], abs=0.2)
    assert lines[0][0][1] > lines[0][2][1], "a higher rate stands higher"
    axes = [path.attrib["d"] for path in root.iter(f"{SVG}path")]
    _, top, bottom = map(float, re.split("[MVH ]", axes[0])[1:4])
    assert places["80"][1] == bottom
    assert places["90"][1] == (top + bottom) / 2, "80 to 100 take all of the axis"
    # the 5,000 that was written last belongs to the second panel
    assert lines[3][0][0] == pytest.approx(places["5,000"][0], abs=0.2)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert all(0 <= x <= width and 0 <= y <= height for line in lines for x, y in line)
    assert all(math.isfinite(v) for line in lines for p in line for v in p)


def test_lines_differ_in_colour_and_dash_and_match_the_legend() -> None:
    styles = [(line.attrib["stroke"], line.attrib["stroke-dasharray"]) for line in chart().iter(f"{SVG}polyline")]
    legend = [
        (line.attrib["stroke"], line.attrib["stroke-dasharray"])
        for line in chart().iter(f"{SVG}line")
        if "stroke-dasharray" in line.attrib
    ]
    assert styles[:2] == styles[2:] == legend
    assert styles[0] != styles[1]
