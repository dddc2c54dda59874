"""The placement of a value as HTML and as text: pictures of split tensors, and a table of all tensors."""

from __future__ import annotations

import html
from collections.abc import Sequence

from distnb.views.placement_model import PlacedTensor, PlacementModel, bounds_text
from distnb.views.wording import filled, html_table, human_bytes, text_table
from distnb.widgets.picture import as_image
from distnb.widgets.value_views.placement_picture import grids, placement_svg

__all__ = ["placement_html", "placement_text"]

_COLUMNS = ("tensor", "shape", "dtype", "part", "on", "device", "each", "held as")
_MOST_PICTURES = 4
_MOST_ROWS = 200
_GREY = "color:#808080"
_KINDS = {
    "copy": "mirrored copy",
    "own": "",
    "rows": "rows of the batch",
    "shard": "shard",
    "partial": "part of a sum",
    "shared": "once, in memory shared by all replicas",
    "stored": "on a parameter server",
}


def placement_html(model: PlacementModel) -> str:
    """Draw the placement as HTML that needs no script and no kernel."""
    pictures = []
    for tensor in _split(model.tensors):
        title = _title(tensor)
        parts = "; ".join(f"{bounds_text(part.what)} on {part.who}" for part in tensor.parts)
        svg = placement_svg(tensor)
        if svg:
            caption = f'<div style="{_GREY};margin-top:4px">{html.escape(title)}</div>'
            pictures.append(caption + as_image(svg, f"{title}: {parts}", wide=True))
    header, rows = filled(_COLUMNS, _rows(model.tensors))
    table = html_table(header, rows[:_MOST_ROWS], numeric=("each",)) if rows else ""
    more = [f"… and {len(rows) - _MOST_ROWS:,} more rows"] if len(rows) > _MOST_ROWS else []
    notes = "".join(f'<div style="{_GREY}">{html.escape(note)}</div>' for note in [*more, *model.notes])
    totals = " · ".join(_totals(model))
    head = f'<div style="{_GREY}">{html.escape(" · ".join(filter(None, [model.title, totals])))}</div>'
    return f'<div class="distnb-placement" style="font-size:12px">{head}{"".join(pictures)}{table}{notes}</div>'


def placement_text(model: PlacementModel) -> str:
    """Return the placement as text for terminals."""
    lines = [" · ".join([model.title, *_totals(model)])]
    for tensor in _split(model.tensors):
        lines += _drawn(tensor)
    header, rows = filled(_COLUMNS, _rows(model.tensors))
    lines += text_table(header, rows[:_MOST_ROWS]) if rows else []
    return "\n".join([*lines, *model.notes])


def _split(tensors: Sequence[PlacedTensor]) -> list[PlacedTensor]:
    """Return the tensors to draw: the first of each group of tensors that are split alike."""
    seen: dict[object, PlacedTensor] = {}
    for tensor in tensors:
        if tensor.is_split:
            cuts = tuple(
                (part.what.bounds and [part.what.bounds[axis] for axis in tensor.cut_axes], part.short)
                for part in tensor.parts
            )
            seen.setdefault(str(cuts), tensor)
    return list(seen.values())[:_MOST_PICTURES]


def _totals(model: PlacementModel) -> list[str]:
    """Return the bytes in each place: `each of 2 replicas: 1.2 MB` if equal, else a text for each place."""
    found = {place: nbytes for place, nbytes in model.by_device().items() if nbytes}
    replicas = {place: nbytes for place, nbytes in found.items() if place.startswith("replica ")}
    if len(replicas) > 1 and len(set(replicas.values())) == 1:
        found = {f"each of {len(replicas)} replicas": next(iter(replicas.values()))} | {
            place: nbytes for place, nbytes in found.items() if place not in replicas
        }
    return [f"{place}: {human_bytes(nbytes)}" for place, nbytes in found.items()]


def _rows(tensors: Sequence[PlacedTensor]) -> list[list[str]]:
    rows = []
    for tensor in tensors:
        for place, part in enumerate(tensor.parts):
            shape = str(part.what.whole) if part.what.whole else ""
            first = place == 0
            rows.append(
                [
                    tensor.name if first else "",
                    shape if first or part.what.whole != tensor.whole else "",
                    tensor.dtype if first else "",
                    bounds_text(part.what),
                    part.who,
                    ", ".join(part.devices),
                    human_bytes(part.what.nbytes) if part.what.nbytes else "",
                    ", ".join(filter(None, [_KINDS[part.what.kind], part.what.note])),
                ]
            )
    return rows


def _title(tensor: PlacedTensor) -> str:
    title = " ".join(filter(None, [tensor.name, str(list(tensor.whole)), tensor.dtype]))
    axes = tensor.cut_axes
    if len(tensor.whole) < 2:
        return title
    down = f"axis {axes[-2]} downwards, " if len(axes) > 1 else ""
    return f"{title}: {down}axis {axes[-1]} to the right"


def _drawn(tensor: PlacedTensor) -> list[str]:
    """Draw a split tensor in characters, with a box for each part."""
    axes = tensor.cut_axes
    lines = [_title(tensor)]
    for title, rows, columns, fixed in grids(tensor):
        lines += [title] if title else []
        cells = []
        for row in rows:
            cut = [{**fixed, axes[-1]: column} | ({axes[-2]: row} if len(axes) > 1 else {}) for column in columns]
            cells.append([", ".join(dict.fromkeys(part.short for part in tensor.holders(at))) or "–" for at in cut])
        width = max(len(text) for line in cells for text in line) + 2
        rule = "+" + "+".join("-" * width for _ in columns) + "+"
        lines += [rule, *(f"|{'|'.join(text.center(width) for text in line)}|\n{rule}" for line in cells)]
    return lines
