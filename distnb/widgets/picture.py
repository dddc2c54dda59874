"""Curves as SVG pictures, for saved notebooks and for front ends without widgets."""

from __future__ import annotations

import base64
import html
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from distnb.views.chart_model import Chart
from distnb.views.curves import Point
from distnb.views.wording import short_number

__all__ = ["as_image", "nice_ticks", "picture", "short_name", "svg"]

_GREY = "#808080"  # an image cannot follow the theme, and mid-grey is visible on light and dark
_RED = "#e5484d"
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 10, 28, 38
_FACTS_LINE = 14
_MOST_MARKS = 12
_MOST_LABELS = 8
_LETTER = 0.6  # the greatest width of most letters, in units of the font's size


class _Area:
    """The size of a chart in units of the picture, and its scales for steps and values."""

    def __init__(self, width: int, foot: int, x_span: tuple[float, float], y_span: tuple[float, float]) -> None:
        self.width, self.right, self.foot = width, width - _RIGHT, foot
        pad = (y_span[1] - y_span[0]) * 0.05
        self.x_span, self.y_span = x_span, (y_span[0] - pad, y_span[1] + pad)

    def x(self, step: float) -> float:
        """Return a step's distance from the left edge."""
        low, high = self.x_span
        return _LEFT + (step - low) / (high - low) * (self.right - _LEFT)

    def y(self, value: float) -> float:
        """Return a value's distance from the top edge."""
        low, high = self.y_span
        return self.foot - (value - low) / (high - low) * (self.foot - _TOP)


def picture(chart: Chart, *, wide: bool = False) -> str:
    """Return a chart as an SVG document."""
    # In JupyterLab both fill their place in a page of usual width without being reduced, so letters have their size.
    width, height = (540, 210) if wide else (340, 214)
    name = html.escape(chart.name)
    parts = [f"<title>{name}</title>", _chart(chart, width, height)]
    return svg(parts, width, height, font_size=12, more=f'data-name="{name}"')


def svg(parts: Iterable[str], width: int, height: float, *, font_size: int = 10, more: str = "") -> str:
    """Return a picture of these parts as an SVG document. `more` are further attributes."""
    look = f'width="{width}" height="{height:.0f}" viewBox="0 0 {width} {height:.0f}"'
    font = f'font-family="system-ui,sans-serif" font-size="{font_size}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {look} {font} {more}>{"".join(parts)}</svg>'


def as_image(picture: str, alt: str, *, wide: bool = False, style: str = "") -> str:
    """Return a picture as an `<img>` element with a data URL.

    Only an image in this form is still shown after the notebook is reopened, without trust, and in every export. Two
    pictures are placed side by side if there is room. A wide picture takes a whole line. `style` replaces this layout.
    """
    encoded = base64.b64encode(picture.encode()).decode()
    side_by_side = "width:min(440px,max(50%,min(330px,100%)));max-width:100%;display:inline-block"
    style = style or ("width:100%;max-width:640px;display:block;margin:2px 0" if wide else side_by_side)
    return f'<img src="data:image/svg+xml;base64,{encoded}" alt="{html.escape(alt, quote=True)}" style="{style}">'


def nice_ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Return about `about` round numbers within a range."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low] if math.isfinite(low) else []
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999) * power
    first = math.ceil(low / step - 1e-9)
    count = int((high - first * step) / step + 1e-9) + 1
    return [round((first + i) * step, 12) + 0.0 for i in range(min(count, 3 * about))]


def _chart(chart: Chart, width: int, height: int) -> str:
    drawn = [(series, series.points()) for series in chart.series]
    points = [point for _, line in drawn for point in line]
    x_span = _span([point[0] for point in points])
    lines = 1 if width > 500 else 2  # of facts, also if one is empty, so that charts side by side are alike
    facts = _broken(chart.facts.replace(" at step ", " at "), lines, width)
    foot = height - _BOTTOM - (lines - 1) * _FACTS_LINE
    area = _Area(width, foot, x_span, _span([value for point in points for value in point[2:]]))
    parts = [_title(chart, area)]
    for tick in nice_ticks(*area.y_span):
        parts.append(f'<path d="M{_LEFT} {area.y(tick):.1f}H{area.right}" stroke="{_GREY}" stroke-opacity=".22"/>')
        at = f'x="{_LEFT - 5}" y="{area.y(tick) + 4:.1f}"'
        parts.append(f'<text {at} text-anchor="end" fill="{_GREY}">{short_number(tick)}</text>')
    ticks = [(area.x(tick), short_number(tick)) for tick in nice_ticks(*x_span, about=6 if width > 500 else 4)]
    for left, words in _legible([(x - _wide(words, 12) / 2, words) for x, words in ticks], 12, width):
        at = f'x="{left + _wide(words, 12) / 2:.1f}" y="{area.foot + 15}"'
        parts.append(f'<text {at} text-anchor="middle" fill="{_GREY}">{words}</text>')
    parts.append(_epochs(chart.epochs, area))
    for series, line in reversed(drawn):  # the first is the most important, so it is drawn on top
        color = series.css_color
        runs = [
            [(area.x(step), area.y(value), area.y(low), area.y(high)) for step, value, low, high in run]
            for run in _finite_runs(line)
        ]
        parts += [_band(run, color) for run in runs]
        parts.append(_stroke(runs, color, 5 if len(line) == 1 else 2.6 if series.thick else 1.3))
    parts.append(_marks([(area.x(point[0]), point[1]) for point in points if not math.isfinite(point[1])], area))
    heads = "".join(f"M{area.x(step) - 5:.1f} {_TOP + 10}l5 -9l5 9z" for step in chart.exploded)
    parts.append(f'<path class="exploded" d="{heads}" fill="{_RED}"/>' if heads else "")
    rows = "".join(f'<tspan x="6" dy="{_FACTS_LINE}">{html.escape(line)}</tspan>' for line in facts)
    top = foot + _BOTTOM - 6 - _FACTS_LINE
    parts.append(f'<text class="facts" y="{top}" font-size="11" fill="{_GREY}">{rows}</text>')
    return "".join(parts)


def _broken(facts: str, lines: int, width: int) -> list[str]:
    """Break a text of facts, if it is too wide and may have two lines, before the last fact that does not fit."""
    if lines == 1 or _wide(facts, 11) <= width:
        return [facts]
    parts = facts.split(" · ")
    first = [parts.pop(0)]
    while parts and _wide(" · ".join([*first, parts[0]]), 11) <= width:
        first.append(parts.pop(0))
    return [" · ".join(first), " · ".join(parts)]


def _title(chart: Chart, area: _Area) -> str:
    labels: list[tuple[str, str]] = []
    for series in chart.series[:_MOST_LABELS]:
        # With many lines the title contains only their labels. The values are in the facts and in the table.
        words = [short_number(series.last)] if len(chart.series) <= 2 else []
        words += [series.label] if series.label else []
        labels.append((" ".join(words), series.css_color))
    if len(chart.series) > _MOST_LABELS:
        labels.append((f"and {len(chart.series) - _MOST_LABELS} more", _GREY))
    room = area.right - _LEFT - sum(7 + 7 * len(words) for words, _ in labels)
    spans = [f'<tspan class="name" font-weight="600">{html.escape(short_name(chart.name, room))}</tspan>']
    spans += [f'<tspan dx="7" fill="{color}">{html.escape(words)}</tspan>' for words, color in labels]
    return f'<text x="{_LEFT}" y="16" fill="{_GREY}">{"".join(spans)}</text>'


def _epochs(epochs: Mapping[int, int], area: _Area) -> str:
    """Draw a dotted line and a number, counted from 1, where an epoch begins. With many epochs, only some are drawn."""
    low, high = area.x_span
    inside = [(step, number) for step, number in sorted(epochs.items()) if low < step < high]
    marks = [(area.x(step), number + 1) for step, number in inside[:: -(-len(inside) // _MOST_MARKS) or 1]]
    dotted = f'stroke="{_GREY}" stroke-opacity=".6" stroke-dasharray="2 3"'
    parts = [f'<path class="epoch" d="M{x:.1f} {_TOP}V{area.foot}" {dotted}/>' for x, _ in marks]
    labels: list[tuple[float, str]] = []
    for x, number in marks:
        words = f"epoch {number}" if not labels else str(number)
        after = x + 3 + _wide(words, 10) <= area.width
        labels.append((x + 3 if after else x - 3 - _wide(words, 10), words))
    for left, words in _legible(labels, 10, area.width):
        parts.append(f'<text x="{left:.1f}" y="{_TOP + 9}" font-size="10" fill="{_GREY}">{words}</text>')
    return "".join(parts)


def _wide(words: str, size: int) -> float:
    return _LETTER * size * len(words)


def _legible(labels: Sequence[tuple[float, str]], size: int, width: float) -> list[tuple[float, str]]:
    """Return the labels (left edge, words) of a row that do not touch the label before, moved into the picture."""
    shown: list[tuple[float, str]] = []
    free = 0.0
    for left, words in labels:
        place = min(left, width - _wide(words, size))
        if place >= free:
            shown.append((place, words))
            free = place + _wide(words, size) + size / 2
    return shown


def short_name(name: str, room: float) -> str:
    """Shorten a name in the middle, since its end is as informative as its beginning."""
    most = max(int(room / 7.3), 8)  # a letter takes about 7.3 units of the picture
    kept = most - 1
    return name if len(name) <= most else f"{name[: (kept + 1) // 2]}…{name[-(kept // 2) :]}"


def _finite_runs(points: Sequence[Point]) -> list[list[Point]]:
    """Return the runs of points with finite values. The line is broken at values that are nan or infinite."""
    runs = itertools.groupby(points, key=lambda point: math.isfinite(point[1]))
    return [list(run) for finite, run in runs if finite]


def _span(values: Iterable[float]) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return 0.0, 1.0
    low, high = min(finite), max(finite)
    if high > low:
        return low, high
    half = abs(low) * 0.05 or 0.5
    return low - half, high + half


def _stroke(runs: Sequence[Sequence[Point]], color: str, width: float) -> str:
    path = "".join(
        "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py, _, _ in run) + ("h0" if len(run) == 1 else "") for run in runs
    )
    look = f'fill="none" stroke="{color}" stroke-width="{width}" stroke-linejoin="round" stroke-linecap="round"'
    return f'<path class="line" d="{path}" {look}/>' if path else ""


def _marks(places: Sequence[tuple[float, float]], area: _Area) -> str:
    """Draw a cross at the foot of the chart for each nan or infinite value, and label the first with its value."""
    if not places:
        return ""
    foot = area.foot - 4
    crosses = "".join(f"M{px - 3:.1f} {foot - 3}l6 6m0 -6l-6 6" for px, _ in places)
    first, value = min(places)
    at = f'x="{first + 6:.1f}"' if first < area.width - 50 else f'x="{first - 6:.1f}" text-anchor="end"'
    return (
        f'<path class="mark" d="{crosses}" fill="none" stroke="{_RED}" stroke-width="1.5"/>'
        f'<text {at} y="{foot + 3}" style="fill:{_RED}">{value:g}</text>'
    )


def _band(screen: Sequence[Point], color: str) -> str:
    """Draw the band from the least to the greatest value, if points represent several steps."""
    if all(low == high for _, _, low, high in screen):
        return ""
    up = "L".join(f"{px:.1f} {high:.1f}" for px, _, _, high in screen)
    down = "L".join(f"{px:.1f} {low:.1f}" for px, _, low, _ in reversed(screen))
    return f'<path class="band" d="M{up}L{down}Z" fill="{color}" fill-opacity=".18"/>'
