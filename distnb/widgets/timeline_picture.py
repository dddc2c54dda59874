"""The time of replicas as text and as SVG pictures: a bar for each replica, or a box for each piece of its time."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping

from distnb.views.crowds import noteworthy, others, unlikeness
from distnb.views.live_model import LiveModel
from distnb.views.timeline_model import KINDS, Piece, Spent, TimelineModel, sentence
from distnb.views.wording import short_duration, short_number
from distnb.widgets.picture import as_image, nice_ticks, svg

__all__ = ["gantt_picture", "shares_picture", "timeline_html", "timeline_image", "timeline_text", "waits_html"]

# Distinguishable with colour blindness, in light and dark themes. Lost time is also striped.
_COLORS = {
    "compute": "#0072b2",
    "communication": "#e69f00",
    "waiting": "#d55e00",
    "input": "#009e73",
    "idle": "#a3a3a3",
}
_WORDS = {**{kind: kind for kind in KINDS}, "waiting": "waiting for others"}
_GREY = "#808080"  # an image cannot follow the theme
_WIDTH = 480  # small, so that the text is legible on a narrow page
_LEFT = 62  # the left edge of the bars
_LEAST_STEPS = 3  # the first steps are dominated by work that happens only once
_READ_S = 1.0  # readers need no more than one new sentence a second, and it costs as much as the rest of the view
_NARROW = 0.3  # units of the picture; narrower bars are not drawn


def timeline_text(model: LiveModel) -> str:
    """Return the breakdown of the time in words, or "" if too little has been measured."""
    spent = _spent(model)
    return sentence(spent) if spent is not None else ""


def timeline_html(model: LiveModel) -> str:
    """Return the widget's picture and sentence while the cell runs, or "" if there is nothing to show."""
    spent = _spent(model, every_s=_READ_S)
    if spent is None:
        return ""
    return f'<div class="timeline">{_drawn(model.timeline, spent)}<div>{html.escape(sentence(spent))}</div></div>'


def timeline_image(model: LiveModel) -> str:
    """Return the picture and the sentence for a saved notebook, or ""."""
    spent = _spent(model)
    if spent is None:
        return ""
    text = sentence(spent)
    image = as_image(_drawn(model.timeline, spent), text, wide=True)
    return f'{image}<div style="font-size:13px">{html.escape(text)}</div>'


def waits_html(model: LiveModel, now: float) -> str:
    """Return the sentences on long waits, now or at the end of the program, as HTML; "" if there are none."""
    lines = "".join(f"<div>{html.escape(line)}</div>" for line in model.waits.lines(now) or model.waited)
    style = "border-left:3px solid #d55e00;padding-left:8px;margin:2px 0"
    return f'<div class="waits" role="status" style="{style}">{lines}</div>' if lines else ""


def _spent(model: LiveModel, every_s: float = 0.0) -> Spent | None:
    return model.timeline.known(_LEAST_STEPS, every_s=every_s)


def _drawn(timeline: TimelineModel, spent: Spent) -> str:
    pieces, ends = timeline.pieces() if timeline.in_detail else ([], [])
    return gantt_picture(pieces, ends) if pieces else shares_picture(spent)


def _row_height(rows: int) -> int:
    return 16 if rows <= 8 else 10


def _svg(name: str, height: float, parts: Iterable[str]) -> str:
    stripes = "".join(
        f'<pattern id="{name}-{kind}" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="5" height="5" fill="{_COLORS[kind]}"/><rect width="1.5" height="5" fill="#fff" opacity=".55"/>'
        "</pattern>"
        for kind in ("waiting", "idle")
    )
    return svg([f"<defs>{stripes}</defs>", *parts], _WIDTH, height, more=f'class="queue {name}"')


def _fill(name: str, kind: str) -> str:
    return f"url(#{name}-{kind})" if kind in ("waiting", "idle") else _COLORS[kind]


def shares_picture(spent: Spent) -> str:
    """Draw a bar for each replica with the kinds of time in its latest steps, on average.

    Of many replicas, those whose time differs most from the others' have bars.
    """
    chosen = noteworthy(unlikeness({replica: own["waiting"] for replica, own in spent.seconds.items()}))
    height = _row_height(len(chosen))
    more = others(len(chosen), len(spent.seconds))
    top = len(chosen) * (height + 3) + 4 + (12 if more else 0)

    def parts() -> Iterator[str]:
        room, length = _WIDTH - _LEFT, spent.end - spent.begin
        for row, replica in enumerate(chosen):
            seconds = spent.seconds[replica]
            left, y = float(_LEFT), row * (height + 3) + 2
            yield _label(replica, y, height)
            for kind in KINDS:
                width = room * seconds[kind] / length
                if width >= _NARROW:
                    tip = f"replica {replica}: {_WORDS[kind]} {short_duration(seconds[kind] / (spent.steps or 1))}"
                    yield _bar("shares", kind, left, y, width, height, tip)
                left += width
        if more:
            yield f'<text x="{_LEFT}" y="{top - 2}" fill="{_GREY}">{more}, which differ less</text>'
        yield from _legend(top, {kind for own in spent.seconds.values() for kind in KINDS if own[kind]})

    return _svg("shares", top + 18, parts())


def gantt_picture(pieces: list[Piece], steps: list[tuple[float, int]]) -> str:
    """Draw each replica's time piece by piece, with the ends of steps.

    Of many replicas, those whose waits differ most from the others' are drawn.
    """
    waiting = dict.fromkeys((each.replica for each in pieces), 0.0)
    for each in pieces:
        waiting[each.replica] += each.end - each.begin if each.kind == "waiting" else 0.0
    rows: Mapping[int, int] = {replica: row for row, replica in enumerate(noteworthy(unlikeness(waiting)))}
    more = others(len(rows), len(waiting))
    pieces = [each for each in pieces if each.replica in rows] if more else pieces
    height = _row_height(len(rows))
    bottom = len(rows) * (height + 3) + 16
    space = 12 if more else 0
    if not pieces:
        return _svg("gantt", 20, [])
    begin, end = min(each.begin for each in pieces), max(each.end for each in pieces)
    scale = (_WIDTH - _LEFT) / (end - begin)

    def parts() -> Iterator[str]:
        for replica, row in rows.items():
            yield _label(replica, row * (height + 3) + 14, height)
        free = float(_LEFT - 30)  # the right edge of the text written above the bars
        for at, number in steps:
            x, words = _LEFT + (at - begin) * scale, f"step {number:,}"
            yield f'<path d="M{x:.1f} 12V{bottom - 2}" stroke="{_GREY}" stroke-width="1" stroke-dasharray="2 2"/>'
            if x - 4.7 * len(words) > free:  # a letter takes less than 5 units
                free = x
                yield f'<text x="{x:.1f}" y="9" text-anchor="end" fill="{_GREY}" font-size="8">{words}</text>'
        for each in pieces:
            width = (each.end - each.begin) * scale
            if width >= _NARROW:
                place = f" ({each.where})" if each.where else ""
                what = f": {each.what}{place}" if each.what else ""
                tip = f"replica {each.replica}: {_WORDS[each.kind]} {short_duration(each.end - each.begin)}{what}"
                x = _LEFT + (each.begin - begin) * scale
                yield _bar("gantt", each.kind, x, rows[each.replica] * (height + 3) + 14, width, height, tip)
        factor, unit = (1e3, "ms") if end - begin < 10 else (1.0, "s")
        for tick in nice_ticks(0.0, (end - begin) * factor, 6):
            x = _LEFT + tick / factor * scale
            if x > _WIDTH - 22:
                continue
            look = f'y="{bottom + 8}" text-anchor="middle" fill="{_GREY}"'
            yield f'<text x="{x:.1f}" {look}>{short_number(tick)} {unit}</text>'
        if more:
            yield f'<text x="{_LEFT}" y="{bottom + 20}" fill="{_GREY}">{more}, which differ less</text>'
        yield from _legend(bottom + 12 + space, {each.kind for each in pieces})

    return _svg("gantt", bottom + 30 + space, parts())


def _label(replica: int, y: float, height: float) -> str:
    middle = y + height / 2 + 4
    return f'<text x="{_LEFT - 8}" y="{middle:.0f}" text-anchor="end" fill="{_GREY}">replica {replica}</text>'


def _bar(name: str, kind: str, x: float, y: float, width: float, height: float, tip: str) -> str:
    place = f'x="{x:.2f}" y="{y:.0f}" width="{width:.2f}" height="{height}"'
    return f'<rect class="{kind}" {place} fill="{_fill(name, kind)}"><title>{html.escape(tip)}</title></rect>'


def _legend(y: float, kinds: set[str]) -> Iterator[str]:
    yield f'<text y="{y + 12:.0f}" x="{_LEFT}" fill="{_GREY}">'
    gap = 0
    for kind in KINDS:
        if kind in kinds:
            yield f'<tspan dx="{gap}" fill="{_COLORS[kind]}">■</tspan><tspan dx="4">{_WORDS[kind]}</tspan>'
            gap = 14
    yield "</text>"
