"""A tensor's histogram as a small picture, and its statistics as texts."""

from __future__ import annotations

from distnb.views.wording import Html, short_number
from distnb.widgets.picture import as_image, svg
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
    line = f'<path d="M0 {_HEIGHT - 0.5}H{_WIDTH}" stroke="#808080" stroke-opacity=".5"/>'
    drawn = svg([f'<path d="{bars}" fill="#3b82f6"/>', line], _WIDTH, _HEIGHT)
    alt = f"histogram from {short_number(statistics.low)} to {short_number(statistics.high)}"
    return Html(as_image(drawn, alt, style="vertical-align:middle;min-width:96px;max-width:none"))


def figures(statistics: Statistics | None) -> tuple[str, str, str]:
    """Return (min, mean, max) of a tensor as texts."""
    if statistics is None or statistics.elements < 2:
        return "", "", ""
    return short_number(statistics.low), short_number(statistics.mean), short_number(statistics.high)
