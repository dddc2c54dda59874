"""A tensor's histogram as a small picture, and its figures as texts."""

from __future__ import annotations

import base64
import html

from distnb.notebook.output.wording import Html, short_number
from distnb.wire.value_facts import Statistics

__all__ = ["figures", "histogram"]

_WIDTH, _HEIGHT = 96, 18


def histogram(told: Statistics | None) -> str:
    """How a tensor's elements are spread, as an image; "" where they are all equal."""
    if told is None or not told.histogram:
        return ""
    most, step = max(told.histogram), _WIDTH / len(told.histogram)
    bars = "".join(
        # One element among a million is to be seen, too.
        f"M{place * step:.1f} {_HEIGHT}v-{max(1.0, count / most * (_HEIGHT - 1)):.1f}h{step - 0.6:.1f}V{_HEIGHT}"
        for place, count in enumerate(told.histogram)
        if count
    )
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}"><path d="{bars}" fill="#3b82f6"/>'
        f'<path d="M0 {_HEIGHT - 0.5}H{_WIDTH}" stroke="#808080" stroke-opacity=".5"/></svg>'
    )
    encoded = base64.b64encode(svg.encode()).decode()
    alt = html.escape(f"histogram from {short_number(told.low)} to {short_number(told.high)}", quote=True)
    look = f'width="{_WIDTH}" height="{_HEIGHT}" style="vertical-align:middle;min-width:96px;max-width:none"'
    return Html(f'<img src="data:image/svg+xml;base64,{encoded}" alt="{alt}" {look}>')


def figures(told: Statistics | None) -> tuple[str, str, str]:
    """(min, mean, max) of a tensor."""
    if told is None or told.elements < 2:
        return "", "", ""
    return short_number(told.low), short_number(told.mean), short_number(told.high)
