"""Display of values and placements in this process: drawn in a notebook, printed in a terminal."""

from __future__ import annotations

import html
import sys
from collections.abc import Mapping
from typing import Any

from distnb.values import DistributedValues
from distnb.views.placement_model import PlacementModel
from distnb.views.value_model import ValueModel
from distnb.widgets.value_views.devices_html import devices_html, devices_text
from distnb.widgets.value_views.placement_html import placement_html, placement_text
from distnb.widgets.value_views.value_html import value_html
from distnb.widgets.value_views.value_text import value_text
from distnb.wire.value_facts import PLACEMENT, VALUE

__all__ = ["as_html", "drawn", "show", "visualize"]


def as_html(value: DistributedValues) -> str:
    """Draw a distributed value of this process, or the value behind a handle."""
    from distnb.notebook.handles.handle import HANDLES
    from distnb.notebook.handles.summaries import as_model

    if isinstance(value, HANDLES):
        return value_html(as_model(value))
    from distnb.runtime.inspection.inspecting import report

    return value_html(_value_model(report(value)))


def drawn(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a display's data, with replicas' reports of values replaced by HTML and text."""
    if VALUE in data:
        model = _value_model(data[VALUE])
        made = {"text/html": value_html(model), "text/plain": value_text(model)}
    elif PLACEMENT in data:
        placement = _placement_model(data[PLACEMENT])
        made = {"text/html": placement_html(placement), "text/plain": placement_text(placement)}
    else:
        return dict(data)
    return {kind: value for kind, value in data.items() if kind not in (VALUE, PLACEMENT)} | made


def visualize(value: Any) -> None:
    """Show the placement of a value, or the devices of a strategy, below the cell or in the terminal."""
    from distnb.notebook.value_placement import devices_of, placement_of, stored_placement
    from distnb.strategies.base import Strategy

    if not isinstance(value, Strategy):
        model = placement_of(value)
        show(placement_html(model), placement_text(model))
        return
    devices, stored = devices_of(value), stored_placement(value)
    pages, texts = [devices_html(devices)], [devices_text(devices)]
    if stored is not None:
        pages.append(placement_html(stored))
        texts.append(placement_text(stored))
    head = f"{value!r} on {', '.join(value.worker_devices)}"
    show(
        f'<div style="color:#808080;font-size:12px">{html.escape(head)}</div>' + "".join(pages),
        "\n".join([head, *texts]),
    )


def show(page: str, text: str) -> None:
    """Show HTML below the cell, or text in the terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None and hasattr(shell, "kernel"):
        shell.display_pub.publish({"text/html": page, "text/plain": text})
    else:
        print(text, flush=True)


def _value_model(report: Mapping[str, Any]) -> ValueModel:
    return ValueModel(kind=report["kind"], size=report["size"], components=report["replicas"])


def _placement_model(report: Mapping[str, Any]) -> PlacementModel:
    size, held = report["size"], report["replicas"]
    notes = [] if any(held.values()) else ["The value contains no tensor now."]
    return PlacementModel.of(f"{report['kind']} on {size} replica{'s' * (size != 1)}", size, held, notes)
