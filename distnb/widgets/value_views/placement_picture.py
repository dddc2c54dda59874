"""The parts of a tensor as a picture: a bar for a tensor split along one axis, grids for more axes.

Parts have a number as well as a colour, so that the picture does not rely on colours alone.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterator, Mapping, Sequence

from distnb.views.placement_model import PlacedPart, PlacedTensor
from distnb.widgets.picture import svg

__all__ = ["grids", "placement_svg"]

_COLORS = ("#b9d3fc", "#fdcfab", "#aee5d2", "#e0c3fc", "#fabfbf", "#f0dba3", "#aee6f0", "#f9c4de")
_INK = "#1f2937"  # text on these colours; an image cannot follow the theme, so cells have a background of their own
_GREY = "#808080"  # text on the page's background
_WIDTH = 560
_ROW = 34  # height of a bar, and of the lowest row of a grid
_LEFT, _TOP = 60, 30
_MOST_GRIDS = 8
_MOST_CELLS = 400

Cell = tuple[tuple[int, int], ...]


def grids(
    tensor: PlacedTensor,
) -> Iterator[tuple[str, list[tuple[int, int]], list[tuple[int, int]], dict[int, tuple[int, int]]]]:
    """Yield each grid of a tensor: its title, its rows and columns, and its bounds on the other axes."""
    axes = tensor.cut_axes
    outer, inner = axes[:-2], axes[-2:]
    for at in itertools.product(*(tensor.cuts(axis) for axis in outer)):
        fixed = dict(zip(outer, at, strict=True))
        title = ", ".join(f"axis {axis}: {first}–{last - 1}" for axis, (first, last) in fixed.items())
        rows = tensor.cuts(inner[0]) if len(inner) == 2 else [(0, 0)]
        yield title, rows, tensor.cuts(inner[-1]), fixed


def placement_svg(tensor: PlacedTensor) -> str:
    """Draw a tensor whose parts are in different places, or return "" if the picture would be too large."""
    axes = tensor.cut_axes
    drawn = list(itertools.islice(grids(tensor), _MOST_GRIDS + 1))
    if len(drawn) > _MOST_GRIDS or any(len(rows) * len(columns) > _MOST_CELLS for _, rows, columns, _ in drawn):
        return ""
    names = dict.fromkeys(part.short for part in tensor.parts)
    colors = {name: _COLORS[place % len(_COLORS)] for place, name in enumerate(names)}
    parts, top = [], 0
    for title, rows, columns, fixed in drawn:
        picture, height = _grid(tensor, (axes[-2] if len(axes) > 1 else None, axes[-1]), rows, columns, fixed, colors)
        caption = f'<text x="{_LEFT}" y="12" fill="{_GREY}">{html.escape(title)}</text>' if title else ""
        parts.append(f'<g transform="translate(0 {top})">{caption}{picture}</g>')
        top += height
    return svg(parts, _WIDTH, top, font_size=11)


def _grid(
    tensor: PlacedTensor,
    axes: tuple[int | None, int],
    rows: Sequence[tuple[int, int]],
    columns: Sequence[tuple[int, int]],
    fixed: Mapping[int, tuple[int, int]],
    colors: Mapping[str, str],
) -> tuple[str, int]:
    """Draw one grid and return it with its height. Cells are to scale, but very small ones are enlarged."""
    xs = _scaled(columns, _WIDTH - _LEFT - 10, least=18)
    tall = _ROW * len(rows)
    if axes[0] is not None:
        tall = max(tall, min(240, int((_WIDTH - _LEFT) * tensor.whole[axes[0]] / max(1, tensor.whole[axes[1]]))))
    ys = _scaled(rows, tall, least=16)
    parts = []
    for (first, last), (x, width) in zip(columns, xs, strict=True):
        label = f"{first:,}" if last - first == 1 else f"{first:,}–{last - 1:,}"
        parts.append(_text(label, x + width / 2, _TOP - 5, width))
        for row, (y, height) in zip(rows, ys, strict=True):
            cell = {**fixed, axes[1]: (first, last)} | ({} if axes[0] is None else {axes[0]: row})
            parts.append(_cell(tensor.holders(cell), x, _TOP + y, width, height, colors))
    if axes[0] is not None:
        for (first, last), (y, height) in zip(rows, ys, strict=True):
            label = f"{first:,}" if last - first == 1 else f"{first:,}–{last - 1:,}"
            at = f'x="{_LEFT - 6}" y="{_TOP + y + height / 2 + 4:.1f}"'
            parts.append(f'<text {at} text-anchor="end" fill="{_GREY}">{label}</text>')
    return "".join(parts), _TOP + tall + 6


def _scaled(pieces: Sequence[tuple[int, int]], room: float, least: float) -> list[tuple[float, float]]:
    """Return the position and the drawn length of each piece."""
    total = sum(last - first for first, last in pieces) or 1
    least = min(least, room / len(pieces))
    free = room - least * len(pieces)
    sizes = [least + free * ((last - first) / total if total > 1 or last > first else 1) for first, last in pieces]
    if not any(last > first for first, last in pieces):
        sizes = [room / len(pieces)] * len(pieces)
    begins = itertools.accumulate(sizes, initial=0.0)
    return [(begin, size) for begin, size in zip(begins, sizes, strict=False)]


def _cell(
    held: Sequence[PlacedPart], x: float, y: float, width: float, height: float, colors: Mapping[str, str]
) -> str:
    x += _LEFT
    frame = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" stroke="{_GREY}" '
    if not held:
        return frame + 'fill="none" stroke-dasharray="3 3"/>'
    name = ", ".join(dict.fromkeys(part.short for part in held))
    devices = ", ".join(dict.fromkeys(device for part in held for device in part.devices))
    color = colors[held[0].short]
    middle, below = x - _LEFT + width / 2, height > 28 and devices
    texts = _text(name, middle, y + height / 2 + (0 if below else 4), width, bold=True, color=_INK)
    if below:
        texts += _text(devices, middle, y + height / 2 + 12, width, color=_INK)
    return f'{frame}fill="{color}"/>{texts}'


def _text(text: str, x: float, y: float, room: float, *, bold: bool = False, color: str = _GREY) -> str:
    """Draw a text centered at a position, shortened to fit the available width."""
    most = int(room / 6.4)
    if most < 1:
        return ""
    shown = text if len(text) <= most else text[: max(1, most - 1)] + "…"
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x + _LEFT:.1f}" y="{y:.1f}" text-anchor="middle" fill="{color}"{weight}>{html.escape(shown)}</text>'
    )
