"""The content of a cell's output: texts and displays, and the combination of several replicas' displays."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from distnb.views.wording import mark
from distnb.wire.value_facts import PLACEMENT, VALUE

__all__ = [
    "WIDGET_VIEW",
    "Area",
    "Bundle",
    "Clear",
    "Instruction",
    "Show",
    "Stream",
    "WriteText",
    "combine",
    "is_figure",
    "plain_text",
]

Stream = Literal["stdout", "stderr"]

_DRAWN_BY_PAGES = ("application/vnd.plotly", "application/vnd.vega")  # their HTML contains random ids
_IMAGES = ("image/png", "image/jpeg", "image/gif", "image/svg+xml")
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
"""The MIME type that represents a widget, by its model's id."""

_REPORTS = (VALUE, PLACEMENT)


@dataclass(frozen=True)
class Bundle:
    """A rich display: a MIME bundle and its metadata, with a text by which equal displays are recognised."""

    data: Mapping[str, Any]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    identity: str = ""

    @classmethod
    def of(cls, data: Mapping[str, Any], metadata: Mapping[str, Any]) -> Bundle:
        """Make a bundle from the arguments of IPython's display publisher."""
        # If there is a figure, only the figure is compared: the plain text with it may contain an object's address.
        seen = {kind: data[kind] for kind in data if kind in _IMAGES or kind.startswith(_DRAWN_BY_PAGES)} or dict(data)
        return cls(dict(data), dict(metadata), json.dumps(seen, sort_keys=True, default=str))


@dataclass(frozen=True)
class WriteText:
    """An instruction to print text on a stream."""

    stream: Stream
    text: str


@dataclass(frozen=True)
class Show:
    """An instruction to show a rich display under a name, or to change the display of that name."""

    name: str
    bundle: Bundle
    update: bool = False


@dataclass(frozen=True)
class Area:
    """An instruction to draw the unfinished lines; without lines, the area is removed."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class Clear:
    """An instruction to remove the cell's output, at once or, with `wait`, when the next output is shown."""

    wait: bool


Instruction = WriteText | Show | Area | Clear


def is_figure(data: Mapping[str, Any]) -> bool:
    """Return whether a bundle is shown side by side with other replicas'.

    Widgets and figures that the page draws are not, because HTML cannot hold them.
    """
    if any(kind in data for kind in _IMAGES):
        return WIDGET_VIEW not in data
    alone = any(kind.startswith((WIDGET_VIEW, *_DRAWN_BY_PAGES)) for kind in data)
    return not alone and any(kind in data for kind in ("text/html", *_REPORTS))


def plain_text(data: Mapping[str, Any]) -> str | None:
    """Return the text of a bundle that is only text, or None."""
    return str(data["text/plain"]) if set(data) == {"text/plain"} else None


def combine(group: Mapping[int, Bundle], total: int, who: str = "") -> list[Bundle]:
    """Combine {replica: display} into one display: a single one if all are equal, else each marked with its replicas.

    Displays that cannot be combined remain one below the other, in the order of the replicas, with marks between them.
    The replicas' reports of one value's components become one report of the whole value.
    """
    for report in _REPORTS:
        reports = [bundle.data[report] for _, bundle in sorted(group.items()) if report in bundle.data]
        if len(reports) == len(group) and len({(each["kind"], each["size"]) for each in reports}) == 1:
            replicas = {replica: part for each in reports for replica, part in each["replicas"].items()}
            return [Bundle.of({report: {**reports[0], "replicas": replicas}}, {})]
    equal: dict[str, list[int]] = {}
    for replica in sorted(group):
        equal.setdefault(group[replica].identity, []).append(replica)
    if len(equal) == 1 and len(group) == total:
        return [next(iter(group.values()))]
    parts = [(mark(replicas, who), group[replicas[0]]) for replicas in equal.values()]
    text = "\n".join(f"{name} {bundle.data.get('text/plain', '')}" for name, bundle in parts)
    if all(plain_text(bundle.data) is not None for _, bundle in parts):
        return [Bundle({"text/plain": text})]
    if all(is_figure(bundle.data) or plain_text(bundle.data) is not None for _, bundle in parts):
        cells = "".join(_captioned(name, bundle, alone=len(parts) == 1) for name, bundle in parts)
        return [Bundle({"text/html": f'<div class="distnb-replicas">{cells}</div>', "text/plain": text})]
    return [each for name, bundle in parts for each in (Bundle({"text/plain": name}), bundle)]


def _captioned(name: str, bundle: Bundle, *, alone: bool) -> str:
    width = "100%" if alone else "48%"
    return (
        f'<div style="display:inline-block;vertical-align:top;max-width:{width};margin:0 12px 6px 0;overflow-x:auto">'
        f'<div style="font-family:monospace;color:#808080">{name}</div>{_as_html(bundle)}</div>'
    )


def _as_html(bundle: Bundle) -> str:
    for kind in _IMAGES:
        if kind in bundle.data:
            value = bundle.data[kind]
            if kind == "image/svg+xml":
                value = base64.b64encode(str(value).encode()).decode()
            size = bundle.metadata.get(kind)
            width = f' width="{int(size["width"])}"' if isinstance(size, Mapping) and "width" in size else ""
            alt = html.escape(str(bundle.data.get("text/plain", "figure")), quote=True)
            return f'<img src="data:{kind};base64,{str(value).strip()}"{width} style="max-width:100%" alt="{alt}">'
    if "text/html" in bundle.data:
        return str(bundle.data["text/html"])
    return f"<pre>{html.escape(str(bundle.data.get('text/plain', '')))}</pre>"
