"""Line charts as SVG text, side by side. Knows numbers and labels only."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_PANEL_WIDTH, _PANEL_HEIGHT = 460, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 16, 56, 56  # margins of a panel
_LEGEND_ROW = 20
# Told apart by most eyes, and by dashes where there is no colour.
_STYLES = (
    ("#0072b2", ""),
    ("#d55e00", "6 3"),
    ("#009e73", "2 3"),
    ("#cc79a7", "8 3 2 3"),
    ("#56b4e9", "4 2"),
    ("#e69f00", "1 2"),
)


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart. `series`: for each label of the legend its (x, y) points, ascending in x; all panels share labels."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[float, float]]]


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers, evenly apart, the first at or below `low` and the last at or above `high`."""
    span = high - low or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / about))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if span / (m * power) <= about)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, max(last, first + 1) + 1)]


def _label(value: float) -> str:
    return f"{value:,.10g}"


def _panel(panel: Panel, left: float) -> list[str]:
    points = [p for line in panel.series.values() for p in line]
    xs, ys = (nice_ticks(min(values), max(values)) for values in zip(*points, strict=True))
    width, height = _PANEL_WIDTH - _LEFT - _RIGHT, _PANEL_HEIGHT - _TOP - _BOTTOM
    x0, y0 = left + _LEFT, _TOP + height

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            round(x0 + width * (x - xs[0]) / (xs[-1] - xs[0]), 1),
            round(y0 - height * (y - ys[0]) / (ys[-1] - ys[0]), 1),
        )

    out = [f'<text x="{x0}" y="{_TOP - 12}" font-weight="bold">{escape(panel.title)}</text>']
    for y in ys:
        row = at(xs[0], y)[1]
        out.append(f'<line x1="{x0}" y1="{row}" x2="{x0 + width}" y2="{row}" stroke="#ddd"/>')
        out.append(f'<text x="{x0 - 6}" y="{row + 4}" text-anchor="end">{_label(y)}</text>')
    for x in xs:
        column = at(x, ys[0])[0]
        out.append(f'<line x1="{column}" y1="{y0}" x2="{column}" y2="{y0 + 5}" stroke="#444"/>')
        out.append(f'<text x="{column}" y="{y0 + 19}" text-anchor="middle">{_label(x)}</text>')
    out.append(f'<path d="M{x0} {_TOP}V{y0}H{x0 + width}" fill="none" stroke="#444"/>')
    out.append(f'<text x="{x0 + width / 2}" y="{y0 + 40}" text-anchor="middle">{escape(panel.x_label)}</text>')
    middle = f"{left + 16} {_TOP + height / 2}"
    out.append(f'<text transform="translate({middle}) rotate(-90)" text-anchor="middle">{escape(panel.y_label)}</text>')
    for (_, line), (colour, dashes) in zip(panel.series.items(), _styles(len(panel.series)), strict=True):
        places = [at(x, y) for x, y in line]
        path = " ".join(f"{x},{y}" for x, y in places)
        out.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>'
        )
        out += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in places]
    return out


def _styles(n: int) -> list[tuple[str, str]]:
    return [_STYLES[i % len(_STYLES)] for i in range(n)]


def line_charts(title: str, panels: Sequence[Panel]) -> str:
    """An SVG document: `title`, the panels side by side, one legend below them."""
    labels = list(panels[0].series)
    width = _PANEL_WIDTH * len(panels)
    height = _PANEL_HEIGHT + _LEGEND_ROW * len(labels) + 12
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{width / 2}" y="20" text-anchor="middle" font-size="14">{escape(title)}</text>',
    ]
    for i, panel in enumerate(panels):
        out += _panel(panel, i * _PANEL_WIDTH)
    for i, (label, (colour, dashes)) in enumerate(zip(labels, _styles(len(labels)), strict=True)):
        y = _PANEL_HEIGHT + _LEGEND_ROW * i
        out.append(
            f'<line x1="{_LEFT}" y1="{y}" x2="{_LEFT + 36}" y2="{y}" stroke="{colour}" stroke-width="2" '
            f'stroke-dasharray="{dashes}"/>'
        )
        out.append(f'<text x="{_LEFT + 44}" y="{y + 4}">{escape(label)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"
