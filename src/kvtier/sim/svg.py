"""Line and bar charts as inline SVG: no script, no fonts, no network. Colours come from the page's style."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 96, 16, 46
_LABEL_GAP = 15.0
Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Series:
    """One line. `style` is a CSS class that sets the colour; `low`, `high` the ends of its error band, if any."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    style: str
    dashed: bool = False
    dots: bool = False
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line with a word to it."""

    x: float
    text: str


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers between `low` and `high`, about `count` of them."""
    span = max(high - low, 1e-12)
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten between `low` and `high`; powers alone where that would be many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) <= 4 else (1,)
    values = [factor * 10.0**power for power in powers for factor in factors]
    return [value for value in values if low * 0.999 <= value <= high * 1.001] or [low, high]


class _Axes:
    """Maps values to places and draws the frame."""

    def __init__(self, x_range: tuple[float, float], y_range: tuple[float, float], log_x: bool) -> None:
        self.x_low, self.x_high = x_range
        self.y_low, self.y_high = y_range
        self.log_x = log_x
        if self.x_high <= self.x_low:
            self.x_high = self.x_low * 1.01 + 1e-9
        if self.y_high <= self.y_low:
            self.y_high = self.y_low + 1.0

    def x(self, value: float) -> float:
        low, high = self.x_low, self.x_high
        if self.log_x:
            value, low, high = math.log(max(value, low)), math.log(low), math.log(high)
        return _LEFT + (value - low) / (high - low) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - _TOP - _BOTTOM)

    def frame(self, x_label: str, y_label: str, x_format: Format, y_format: Format) -> list[str]:
        parts = []
        for value in ticks(self.y_low, self.y_high):
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(
                f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{y_format(value)}</text>'
            )
        bottom = HEIGHT - _BOTTOM
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>')
        for value in log_ticks(self.x_low, self.x_high) if self.log_x else ticks(self.x_low, self.x_high, 6):
            x = self.x(value)
            parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{x_format(value)}</text>'
            )
        middle = (_LEFT + WIDTH - _RIGHT) / 2
        parts.append(f'<text class="label" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
        centre = (_TOP + bottom) / 2
        parts.append(
            f'<text class="label" x="14" y="{centre}" text-anchor="middle" transform="rotate(-90 14 {centre})">'
            f"{escape(y_label)}</text>"
        )
        return parts


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_format: Format = "{:g}".format,
    y_format: Format = "{:g}".format,
    log_x: bool = False,
    y_high: float | None = None,
    marks: Sequence[Mark] = (),
    legend: bool = False,
) -> str:
    """An `<svg>` with one line a series, named at its end, or in a legend where the ends are at one place.

    y begins at 0; points without an x > 0 are left out of a logarithmic axis. Values under the pointer show as
    tooltips where a series has dots.
    """
    series = [one for one in series if len(one.xs)]
    xs = [x for one in series for x in one.xs if x > 0 or not log_x] or [1.0]
    ys = [y for one in series for y in (*one.ys, *one.high)] or [1.0]
    axes = _Axes((min(xs), max(xs)), (0.0, y_high or max(ys) * 1.06 or 1.0), log_x)
    parts = axes.frame(x_label, y_label, x_format, y_format)
    for mark in marks:
        x = axes.x(mark.x)
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>')
        anchor = "end" if x > WIDTH / 2 else "start"
        shift = -6 if anchor == "end" else 6
        parts.append(
            f'<text class="label" x="{x + shift:.1f}" y="{HEIGHT - _BOTTOM - 8}" text-anchor="{anchor}">'
            f"{escape(mark.text)}</text>"
        )
    for one in series:
        parts += _line(axes, one, x_format, y_format, log_x)
    parts += _legend(series) if legend else _end_labels(axes, series)
    return _svg(parts, title)


def _legend(series: Sequence[Series]) -> list[str]:
    """In the upper left, where rising curves leave room."""
    parts = []
    for number, one in enumerate(series):
        y = _TOP + 14 + number * 19
        dash = ' stroke-dasharray="6 4"' if one.dashed else ""
        parts.append(f'<line class="line {one.style}"{dash} x1="{_LEFT + 14}" x2="{_LEFT + 40}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="name {one.style}" x="{_LEFT + 48}" y="{y + 4}">{escape(one.name)}</text>')
    return parts


def _line(axes: _Axes, one: Series, x_format: Format, y_format: Format, log_x: bool) -> list[str]:
    points = [(axes.x(x), axes.y(y), x, y) for x, y in zip(one.xs, one.ys, strict=True) if x > 0 or not log_x]
    parts = []
    if len(one.low):
        upper = [f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in zip(one.xs, one.high, strict=True)]
        lower = [f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in zip(one.xs, one.low, strict=True)]
        parts.append(f'<polygon class="band {one.style}" points="{" ".join(upper + lower[::-1])}"/>')
    dash = ' stroke-dasharray="6 4"' if one.dashed else ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in points)
    parts.append(f'<polyline class="line {one.style}"{dash} points="{path}"/>')
    if one.dots:
        parts += [
            f'<circle class="dot {one.style}" cx="{px:.1f}" cy="{py:.1f}" r="4">'
            f"<title>{escape(one.name)}: {y_format(y)} at {x_format(x)}</title></circle>"
            for px, py, x, y in points
        ]
    return parts


def _end_labels(axes: _Axes, series: Sequence[Series]) -> list[str]:
    """Names beside the lines' ends, moved apart where they would overlap."""
    wanted = sorted(((axes.y(one.ys[-1]), axes.x(one.xs[-1]), one) for one in series), key=lambda end: end[0])
    places: list[float] = []
    for y, _, _ in wanted:
        places.append(max(y, places[-1] + _LABEL_GAP) if places else max(y, _TOP + 4.0))
    overflow = max(0.0, places[-1] - (HEIGHT - _BOTTOM)) if places else 0.0
    return [
        f'<text class="name {one.style}" x="{x + 9:.1f}" y="{place - overflow + 4:.1f}">{escape(one.name)}</text>'
        for place, (_, x, one) in zip(places, wanted, strict=True)
    ]


def bar_chart(
    names: Sequence[str],
    groups: Sequence[tuple[str, Sequence[float], str]],
    *,
    title: str,
    value_format: Format,
) -> str:
    """An `<svg>` with horizontal bars: for each of `names` one bar of every group (label, a value a name, style)."""
    row, bar, left, right = 24 * len(groups) + 14, 18, 110, 110
    height = 14 + row * len(names) + 26
    high = max([value for _, values, _ in groups for value in values], default=0.0) or 1.0
    parts = []
    for i, name in enumerate(names):
        top = 10 + i * row
        middle = top + 12 * len(groups)
        parts.append(
            f'<text class="label strong" x="{left - 10}" y="{middle + 4}" text-anchor="end">{escape(name)}</text>'
        )
        for j, (label, values, style) in enumerate(groups):
            y = top + j * 24
            width = values[i] / high * (WIDTH - left - right)
            shown = value_format(values[i]) if values[i] else "-"
            parts.append(
                f'<rect class="bar {style}" x="{left}" y="{y}" width="{width:.1f}" height="{bar}" rx="3">'
                f"<title>{escape(name)}, {escape(label)}: {shown}</title></rect>"
            )
            parts.append(f'<text class="tick" x="{left + width + 6:.1f}" y="{y + 13}">{shown}</text>')
    x = float(left)
    for label, _, style in groups:
        parts.append(f'<rect class="bar {style}" x="{x}" y="{height - 18}" width="12" height="12" rx="3"/>')
        parts.append(f'<text class="label" x="{x + 18}" y="{height - 8}">{escape(label)}</text>')
        x += 40 + 8 * len(label)
    return _svg(parts, title, height)


def _svg(parts: Sequence[str], title: str, height: int = HEIGHT) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title, quote=True)}">'
        + "".join(parts)
        + "</svg>"
    )
