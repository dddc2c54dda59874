"""The devices of a cluster as HTML and as text: a bar for each memory, and a table."""

from __future__ import annotations

import html

from distnb.views.chart_model import COLORS
from distnb.views.devices_model import DevicesModel, MemoryPool
from distnb.views.wording import filled, html_table, human_bytes, text_table
from distnb.widgets.picture import as_image, svg

__all__ = ["devices_html", "devices_text"]

_GREY = "#808080"
_WIDTH, _HEIGHT = 560, 16
_CHARACTERS = 40
_COLUMNS = ("device", "used by", "holds")


def devices_html(model: DevicesModel) -> str:
    """Draw the table and the memory bars as HTML."""
    bars = "".join(_bar(memory) for memory in model.memories)
    header, rows = filled(_COLUMNS, _rows(model))
    return f'<div class="distnb-devices" style="font-size:12px">{html_table(header, rows)}{bars}</div>'


def devices_text(model: DevicesModel) -> str:
    """Return the table and the memory bars as plain text."""
    lines = text_table(*filled(_COLUMNS, _rows(model)))
    for memory in model.memories:
        taken = round((memory.total - memory.free) / (memory.total or 1) * _CHARACTERS)
        own = min(taken, round(sum(memory.used.values()) / (memory.total or 1) * _CHARACTERS))
        bar = "#" * own + "=" * (taken - own) + "." * (_CHARACTERS - taken)
        lines.append(f"{memory.name}: [{bar}] {memory.text}")
    return "\n".join(lines)


def _rows(model: DevicesModel) -> list[list[str]]:
    return [[row.device, ", ".join(row.users) or "–", row.holds_text] for row in model.devices]


def _bar(memory: MemoryPool) -> str:
    """Draw a memory as a bar: the bytes used by each engine, those used by other processes, and the free bytes."""
    parts = [*((name, nbytes, COLORS[i % len(COLORS)], 0.75) for i, (name, nbytes) in enumerate(memory.used.items()))]
    parts.append(("others", memory.others, _GREY, 0.45))
    drawn, begin, scale = [], 0.0, _WIDTH / (memory.total or 1)
    for name, nbytes, color, opacity in parts:
        width = nbytes * scale
        if width >= 0.5:
            title = f"<title>{html.escape(name)}</title>"
            look = f'fill="{color}" fill-opacity="{opacity}"'
            drawn.append(
                f'<rect x="{begin:.1f}" y="1" width="{width:.1f}" height="{_HEIGHT - 2}" {look}>{title}</rect>'
            )
        begin += width
    frame = f'<rect x=".5" y=".5" width="{_WIDTH - 1}" height="{_HEIGHT - 1}" rx="3" fill="none" stroke="{_GREY}"/>'
    legend = [
        f'<span style="color:{color}">■</span> {html.escape(name)}: {human_bytes(nbytes)}'
        for name, nbytes, color, _ in parts
        if nbytes
    ]
    legend.append(f"free: {human_bytes(memory.free)} of {human_bytes(memory.total)}")
    caption = f"{html.escape(memory.name)}: {' · '.join(legend)}"
    image = as_image(svg([*drawn, frame], _WIDTH, _HEIGHT), f"{memory.name}: {memory.text}", wide=True)
    return f'<div style="color:{_GREY};margin-top:4px">{caption}</div>{image}'
