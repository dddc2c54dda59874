"""A tensor's histogram as a small picture, and its statistics as texts."""

from __future__ import annotations

import base64
import html

from distnb.views.wording import Html, short_number
from distnb.wire.value_facts import Statistics

__all__ = ["figures", "histogram"]

_WIDTH, _HEIGHT = 96, 18


def histogram(statistics: Statistics | None) -> str:
    """Draw the distribution of a tensor's elements as an image, or return "" if all elements are equal."""
    if statistics is None or not statistics.histogram:
        return ""
    most, step = max(statistics.histogram), _WIDTH / len(statistics.histogram)
    bars = "".join(
        # A bar is at least one unit high, so that one element among a million is visible.
        f"M{place * step:.1f} {_HEIGHT}v-{max(1.0, count / most * (_HEIGHT - 1)):.1f}h{step - 0.6:.1f}V{_HEIGHT}"
        for place, count in enumerate(statistics.histogram)
        if count
    )
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}"><path d="{bars}" fill="#3b82f6"/>'
        f'<path d="M0 {_HEIGHT - 0.5}H{_WIDTH}" stroke="#808080" stroke-opacity=".5"/></svg>'
    )
    encoded = base64.b64encode(svg.encode()).decode()
    alt = html.escape(f"histogram from {short_number(statistics.low)} to {short_number(statistics.high)}", quote=True)
    look = f'width="{_WIDTH}" height="{_HEIGHT}" style="vertical-align:middle;min-width:96px;max-width:none"'
    return Html(f'<img src="data:image/svg+xml;base64,{encoded}" alt="{alt}" {look}>')


def figures(statistics: Statistics | None) -> tuple[str, str, str]:
    """Return (min, mean, max) of a tensor as texts."""
    if statistics is None or statistics.elements < 2:
        return "", "", ""
    return short_number(statistics.low), short_number(statistics.mean), short_number(statistics.high)
