"""What a cell shows: texts and displays, and how those of several replicas look side by side."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from distnb.notebook.output.wording import mark
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

_IMAGES = ("image/png", "image/jpeg", "image/gif", "image/svg+xml")
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
"""The kind of data that stands for a widget, by its model's id."""

_REPORTS = (VALUE, PLACEMENT)


@dataclass(frozen=True)
class Bundle:
    """One rich display: MIME bundle and metadata, with a text that says whether two are equal."""

    data: Mapping[str, Any]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    identity: str = ""

    @classmethod
    def of(cls, data: Mapping[str, Any], metadata: Mapping[str, Any]) -> Bundle:
        """Make one of what IPython's display publisher takes."""
        # The image decides where there is one: the plain text beside it may hold an object's address.
        seen = {kind: data[kind] for kind in _IMAGES if kind in data} or dict(data)
        return cls(dict(data), dict(metadata), json.dumps(seen, sort_keys=True, default=str))

    @property
    def site(self) -> bytes | None:
        """The line of the user's that a replica's part of something is shown from; None of what stands for itself."""
        found: bytes | None = next((self.data[kind]["site"] for kind in _REPORTS if kind in self.data), None)
        return found


@dataclass(frozen=True)
class WriteText:
    """An instruction: print text on a stream."""

    stream: Stream
    text: str


@dataclass(frozen=True)
class Show:
    """An instruction: show a rich display under a name, or change the one that has it."""

    name: str
    bundle: Bundle
    update: bool = False


@dataclass(frozen=True)
class Area:
    """An instruction: draw the lines that are not finished yet; none of them: remove the area."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class Clear:
    """An instruction: remove everything that the cell has shown; with `wait`, when the next thing is shown."""

    wait: bool


Instruction = WriteText | Show | Area | Clear


def is_figure(data: Mapping[str, Any]) -> bool:
    """Return whether a bundle is shown beside those of other replicas: a widget is not, HTML cannot hold it."""
    return WIDGET_VIEW not in data and any(kind in data for kind in ("text/html", *_IMAGES, *_REPORTS))


def plain_text(data: Mapping[str, Any]) -> str | None:
    """The text of a bundle that is nothing but text, else None."""
    return str(data["text/plain"]) if set(data) == {"text/plain"} else None


def combine(group: Mapping[int, Bundle], total: int, who: str = "") -> Bundle:
    """What is displayed for {replica: display}: one where all are equal, else each with its replicas' mark.

    What replicas told of components of one value is told of that value.
    """
    for report in _REPORTS:
        told = [bundle.data[report] for _, bundle in sorted(group.items()) if report in bundle.data]
        if len(told) == len(group) and len({(each["kind"], each["size"]) for each in told}) == 1:
            replicas = {replica: part for each in told for replica, part in each["replicas"].items()}
            return Bundle.of({report: {**told[0], "replicas": replicas}}, {})
    equal: dict[str, list[int]] = {}
    for replica in sorted(group):
        equal.setdefault(group[replica].identity, []).append(replica)
    if len(equal) == 1 and len(group) == total:
        return next(iter(group.values()))
    parts = [(mark(replicas, who), group[replicas[0]]) for replicas in equal.values()]
    text = "\n".join(f"{name} {bundle.data.get('text/plain', '')}" for name, bundle in parts)
    if all(plain_text(bundle.data) is not None for _, bundle in parts):
        return Bundle({"text/plain": text})
    cells = "".join(_captioned(name, bundle, alone=len(parts) == 1) for name, bundle in parts)
    return Bundle({"text/html": f'<div class="distnb-replicas">{cells}</div>', "text/plain": text})


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
