"""The queue of a coordinator as an SVG picture: a bar of all its closures, and the number of each kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from distnb.widgets.picture import svg

__all__ = ["queue_picture"]

_COLORS = {"done": "#10b981", "failed": "#ef4444", "cancelled": "#ca8a04", "running": "#3b82f6", "waiting": "#a3a3a3"}
_GREY = "#808080"  # an image cannot follow the theme
_WIDTH, _HEIGHT = 480, 36
_BAR = 10
_LEAST = 3.0  # the width that makes even one closure visible


def queue_picture(counts: Mapping[str, int], also: str = "") -> str:
    """Draw the bar and the legend below it, with the text `also` at the end of the legend.

    Args:
        counts: The numbers by kind: "done", "failed", "cancelled", "running", "waiting" and "retried". "retried" is in
            the legend only.
        also: A text for the right end of the legend.
    """
    return svg([*_bar(counts), *_legend(counts, also)], _WIDTH, _HEIGHT, more='class="queue"')


def _bar(counts: Mapping[str, int]) -> Iterator[str]:
    kinds = {name: counts[name] for name in _COLORS if counts[name]}
    yield f'<clipPath id="bar"><rect y="2" width="{_WIDTH}" height="{_BAR}" rx="{_BAR / 2}"/></clipPath>'
    yield '<g clip-path="url(#bar)">'
    left, room = 0.0, _WIDTH - _LEAST * len(kinds)
    for name, number in kinds.items():
        width = _LEAST + room * number / sum(kinds.values())
        yield f'<rect class="{name}" x="{left:.1f}" y="2" width="{width:.1f}" height="{_BAR}" fill="{_COLORS[name]}"/>'
        left += width
    yield "</g>"


def _legend(counts: Mapping[str, int], also: str) -> Iterator[str]:
    yield f'<text y="29" fill="{_GREY}">'
    gap = 0
    for name in filter(counts.get, (*_COLORS, "retried")):
        sign, color = ("●", _COLORS[name]) if name in _COLORS else ("↻", _GREY)
        yield f'<tspan dx="{gap}" fill="{color}">{sign}</tspan><tspan dx="5">{counts[name]:,} {name}</tspan>'
        gap = 16
    yield "</text>"
    if also:
        yield f'<text x="{_WIDTH}" y="29" text-anchor="end" fill="{_GREY}">{also}</text>'
