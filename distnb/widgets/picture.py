"""Curves as an SVG picture: what stays in the saved notebook, and what is shown where widgets do not work."""

from __future__ import annotations

import base64
import html
import itertools
import math
from collections.abc import Iterable, Sequence

from distnb.notebook.output.live_model import Curve, LiveModel, Point
from distnb.notebook.output.wording import mark

__all__ = ["as_image", "nice_ticks", "pictures", "short_name", "short_number"]

_COLORS = ("#3b82f6", "#f97316", "#10b981", "#a855f7", "#ef4444", "#ca8a04", "#06b6d4", "#ec4899")
_GREY = "#808080"  # an image cannot follow the theme: mid-grey shows on light and dark
_RED = "#ef4444"
_WIDTH, _HEIGHT = 280, 180
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 10, 26, 22


def pictures(model: LiveModel) -> dict[str, str]:
    """Every curve of a model as an SVG document, by its name."""
    total = max(1, len(model.rows))
    look = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    font = 'font-family="system-ui,sans-serif" font-size="11"'
    drawn = {}
    for name, curve in model.curves.items():
        own = f'data-name="{html.escape(name)}"><title>{html.escape(name)}</title>'
        drawn[name] = f'<svg xmlns="http://www.w3.org/2000/svg" {look} {font} {own}{_chart(curve, total)}</svg>'
    return drawn


def as_image(svg: str, alt: str, *, wide: bool = False) -> str:
    """The one form of a picture that survives reopening, missing trust and every export.

    As many stand side by side as there is room for, up to three; a wide one stands alone.
    """
    encoded = base64.b64encode(svg.encode()).decode()
    look = "width:100%;max-width:640px;display:block;margin:2px 0"
    if not wide:
        look = "width:33%;min-width:240px;max-width:340px;display:inline-block"
    return f'<img src="data:image/svg+xml;base64,{encoded}" alt="{html.escape(alt, quote=True)}" style="{look}">'


def nice_ticks(low: float, high: float, about: int = 4) -> list[float]:
    """About so many round numbers within a range."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low] if math.isfinite(low) else []
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999) * power
    first = math.ceil(low / step - 1e-9)
    count = int((high - first * step) / step + 1e-9) + 1
    return [round((first + i) * step, 12) + 0.0 for i in range(min(count, 3 * about))]


def short_number(value: float | None) -> str:
    """A number in little room."""
    if value is None:
        return ""
    if value and math.isfinite(value) and abs(value) >= 100_000:
        return f"{value:.3g}"
    return f"{value:.4g}"


def _chart(curve: Curve, total: int) -> str:
    lines = curve.shown()
    points = [point for line in lines.values() for point in line.points]
    x_low, x_high = _span([point[0] for point in points])
    y_low, y_high = _span([value for point in points for value in point[2:]])
    pad = (y_high - y_low) * 0.05
    y_low, y_high = y_low - pad, y_high + pad

    def x(step: float) -> float:
        return _LEFT + (step - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - y_low) / (y_high - y_low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_title(curve, [(replicas, line.last) for replicas, line in lines.items()], total)]
    for tick in nice_ticks(y_low, y_high):
        parts.append(f'<path d="M{_LEFT} {y(tick):.1f}H{_WIDTH - _RIGHT}" stroke="{_GREY}" stroke-opacity=".22"/>')
        at = f'x="{_LEFT - 5}" y="{y(tick) + 3.5:.1f}"'
        parts.append(f'<text {at} text-anchor="end" fill="{_GREY}">{short_number(tick)}</text>')
    for tick in nice_ticks(x_low, x_high):
        parts.append(
            f'<text x="{x(tick):.1f}" y="{_HEIGHT - 6}" text-anchor="middle" fill="{_GREY}">{short_number(tick)}</text>'
        )
    for replicas, line in lines.items():
        color = _COLORS[replicas[0] % len(_COLORS)]
        thick = len(replicas) > 1 or total == 1
        runs = [
            [(x(step), y(value), y(low), y(high)) for step, value, low, high in run]
            for run in _finite_runs(line.points)
        ]
        parts += [_band(run, color) for run in runs]
        parts.append(_stroke(runs, color, 5 if len(line.points) == 1 else 2.6 if thick else 1.3))
    parts.append(_marks([(x(point[0]), point[1]) for point in points if not math.isfinite(point[1])]))
    return "".join(parts)


def _title(curve: Curve, last: Sequence[tuple[tuple[int, ...], float | None]], total: int) -> str:
    told: list[tuple[str, str]] = []
    for replicas, value in last[:8]:
        # With many lines the title says which is which; the table has their values.
        words = [short_number(value)] if len(last) <= 2 else []
        words += [mark(replicas)] if total > 1 else []
        told.append((" ".join(words), _COLORS[replicas[0] % len(_COLORS)]))
    room = _WIDTH - _LEFT - sum(6 + 6.5 * len(words) for words, _ in told)
    spans = [f'<tspan class="name" font-weight="600">{html.escape(short_name(curve.name, room))}</tspan>']
    spans += [f'<tspan dx="6" fill="{color}">{words}</tspan>' for words, color in told]
    return f'<text x="{_LEFT}" y="16" fill="{_GREY}">{"".join(spans)}</text>'


def short_name(name: str, room: float) -> str:
    """A name in little room: its end tells as much as its beginning."""
    most = max(int(room / 7.3), 8)  # a letter takes about 7.3 units of the picture
    kept = most - 1
    return name if len(name) <= most else f"{name[: (kept + 1) // 2]}…{name[-(kept // 2) :]}"


def _finite_runs(points: Sequence[Point]) -> list[list[Point]]:
    """The points between those that are nan or infinite: there the line is broken."""
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


def _marks(places: Sequence[tuple[float, float]]) -> str:
    """A cross at the foot of the picture for each value that is nan or infinite; the first says which of them it is."""
    if not places:
        return ""
    foot = _HEIGHT - _BOTTOM - 4
    crosses = "".join(f"M{px - 3:.1f} {foot - 3}l6 6m0 -6l-6 6" for px, _ in places)
    first, value = min(places)
    at = f'x="{first + 6:.1f}"' if first < _WIDTH - 50 else f'x="{first - 6:.1f}" text-anchor="end"'
    return (
        f'<path class="mark" d="{crosses}" fill="none" stroke="{_RED}" stroke-width="1.5"/>'
        f'<text {at} y="{foot + 3}" style="fill:{_RED}">{value:g}</text>'
    )


def _band(screen: Sequence[Point], color: str) -> str:
    """Where points stand for many steps: from the least to the greatest value."""
    if all(low == high for _, _, low, high in screen):
        return ""
    up = "L".join(f"{px:.1f} {high:.1f}" for px, _, _, high in screen)
    down = "L".join(f"{px:.1f} {low:.1f}" for px, _, low, _ in reversed(screen))
    return f'<path class="band" d="M{up}L{down}Z" fill="{color}" fill-opacity=".18"/>'
