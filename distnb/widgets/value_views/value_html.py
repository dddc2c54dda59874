"""A distributed value as HTML: a table, or a tree of tables. It needs no script and no kernel."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping

from distnb.views.value_model import Folded, ValueModel, fold, parts, replicas_text
from distnb.views.wording import Html, filled, html_table, human_bytes, short_number
from distnb.widgets.value_views.histogram import figures, histogram
from distnb.wire.value_facts import Inspected

__all__ = ["value_html"]

_RED = "#ef4444"
_GREY = "color:#808080"
_FACTS = ("name", "on", "type", "shape", "dtype", "device", "parameters", "size")
_COLUMNS = (*_FACTS, "min", "mean", "max", "norm", "grad norm", "spread", "value", "note")
_SIDE_BY_SIDE = "display:inline-block;vertical-align:top;margin:2px 12px 4px 0;max-width:48%"
_NUMERIC = ("parameters", "size", "min", "mean", "max", "norm", "grad norm")

Parts = Mapping[int, Inspected]


def value_html(model: ValueModel) -> str:
    """Draw the value. Equal components share a row. Drifted components are red, with a warning."""
    drawing = _Drawing(model)
    body = drawing.section("", model.components) if model.components else ""
    absent = [f"{replicas_text((replica,))}: {why}" for replica, why in model.absent.items()]
    notes = "".join(f'<div style="{_GREY}">{html.escape(note)}</div>' for note in (*absent, *model.notes))
    warning = model.warning()
    alert = f'<div style="color:{_RED}" role="alert">⚠ {html.escape(warning)}</div>' if warning else ""
    title = f'<div style="{_GREY}">{html.escape(model.title)}</div>'
    return f'<div class="distnb-value" style="font-size:12px">{title}{alert}{body}{notes}</div>'


class _Drawing:
    def __init__(self, model: ValueModel) -> None:
        self._model = model

    def section(self, name: str, components: Parts, depth: int = 0) -> str:
        """Draw a part of the value and everything in it."""
        if all(each.items for each in components.values()):
            return self._tree(name, components, depth)
        return self._table([(name, components)])

    def _tree(self, name: str, components: Parts, depth: int) -> str:
        body = []
        for leaves, group in itertools.groupby(
            parts(components), key=lambda part: not any(e.items for e in part[1].values())
        ):
            if leaves:
                body.append(self._table(list(group)))
            else:
                body += [self.section(inner, each, depth + 1) for inner, each in group]
        left_out = max(each.left_out for each in components.values())
        if left_out:
            body.append(f'<div style="{_GREY}">… and {left_out:,} more</div>')
        is_open = " open" if depth == 0 or self._drifts(components) else ""
        inside = f'<div style="margin-left:18px">{"".join(body)}</div>'
        return f"<details{is_open}><summary>{self._summary(name, components)}</summary>{inside}</details>"

    def _summary(self, name: str, components: Parts) -> str:
        texts: list[tuple[str, Folded]] = []
        folded = fold(components)
        for group in folded:
            what = group.what
            facts = [f"{what.type}({what.text})" if what.parameters >= 0 and what.text else what.type]
            if what.parameters >= 0:
                facts.append(f"{what.parameters:,} parameters")
            else:
                facts.append(what.text)
            facts += [human_bytes(what.nbytes)] if what.nbytes else []
            facts += [f"norm {short_number(what.norm)}"] if what.norm is not None else []
            facts += [f"grad norm {short_number(what.gradient_norm)}"] if what.gradient_norm is not None else []
            facts += [what.note] if what.note else []
            texts.append((html.escape(" · ".join(filter(None, facts))), group))
        several = len({text for text, _ in texts}) > 1 or len(components) < self._model.size
        if not several and not self._drifts(components):
            texts = texts[:1]
        else:
            texts = [(f"{html.escape(self._whose(group))}: {text}", group) for text, group in texts]
        shown = f"<b>{html.escape(name)}</b> " if name else ""
        return shown + " | ".join(self._marked(text, group) for text, group in texts)

    def _table(self, leaves: Iterable[tuple[str, Parts]]) -> str:
        leaves = list(leaves)
        # A component that is only a picture needs no row.
        rows = [
            row for name, components in leaves if not _are_pictures(components) for row in self._rows(name, components)
        ]
        header, rows = filled(_COLUMNS, rows)
        table = html_table(header, rows, numeric=_NUMERIC) if rows else ""
        return table + "".join(self._gallery(name, components) for name, components in leaves)

    def _gallery(self, name: str, components: Parts) -> str:
        shown = []
        for group in fold(components):
            if not group.what.picture:
                continue
            title = html.escape(" ".join(filter(None, [name, self._whose(group) if self._model.size > 1 else ""])))
            alt = html.escape(" ".join(filter(None, [group.what.type, group.what.shape, "of", title])), quote=True)
            image = f'<img src="{group.what.picture}" alt="{alt}" style="max-width:100%">'
            text = self._marked(title, group)
            shown.append(f'<div style="{_SIDE_BY_SIDE}"><div style="{_GREY}">{text}</div>{image}</div>')
        return f"<div>{''.join(shown)}</div>" if shown else ""

    def _rows(self, name: str, components: Parts) -> Iterator[list[str]]:
        for place, group in enumerate(fold(components)):
            what = group.what
            numbers = figures(what.statistics)
            norm = what.statistics.norm if what.statistics is not None and what.statistics.elements > 1 else what.norm
            row = [
                name if not place else "",
                self._whose(group) if self._model.size > 1 else "",
                what.type if what.shape or not what.text or what.parameters >= 0 else "",
                what.shape,
                what.dtype,
                ", ".join(group.devices),
                f"{what.parameters:,}" if what.parameters > 0 else "",
                human_bytes(what.nbytes) if what.nbytes else "",
                *numbers,
                short_number(norm),
                short_number(what.gradient_norm),
                histogram(what.statistics),
                _shown(what),
                self._notes(group),
            ]
            yield [cell if isinstance(cell, Html) else Html(self._marked(html.escape(cell), group)) for cell in row]

    def _notes(self, group: Folded) -> str:
        statistics, notes = group.what.statistics, []
        if self._is_drifted(group):
            notes.append("drift")
        if group.broken:
            notes.append(f'<span style="color:{_RED}">⚠ {group.broken}</span>')
        elif group.what.norm is not None and not math.isfinite(group.what.norm):
            notes.append(f'<span style="color:{_RED}">⚠ not finite</span>')
        if statistics is not None and statistics.sampled < statistics.elements:
            notes.append(f"a sample of {statistics.sampled:,} elements")
        if group.what.note:
            notes.append(html.escape(group.what.note))
        return Html(self._marked(", ".join(notes), group)) if notes else ""

    def _whose(self, group: Folded) -> str:
        return replicas_text(group.replicas)

    def _drifts(self, components: Parts) -> bool:
        return self._model.is_mirrored and any(group.differs for group in fold(components))

    def _is_drifted(self, group: Folded) -> bool:
        return self._model.is_mirrored and group.differs

    def _marked(self, text: str, group: Folded) -> str:
        return f'<span style="color:{_RED}">{text}</span>' if text and self._is_drifted(group) else text


def _shown(what: Inspected) -> str:
    style = "font-family:monospace;white-space:pre-wrap;display:inline-block;max-width:44em"
    return Html(f'<span style="{style}">{html.escape(what.text)}</span>') if what.text and what.parameters < 0 else ""


def _are_pictures(components: Parts) -> bool:
    return all(each.picture and not each.shape for each in components.values())
