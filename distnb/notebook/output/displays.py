"""What a cell shows: texts and displays, and how those of several replicas look side by side.

Every replica shows a sequence of figures. Equal ones are paired first, those between are paired in order, and what
is left stands alone: so a figure of replica 0 only shifts nothing. The pairing is made anew with each figure, since
displays can be changed afterwards.
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from distnb.notebook.output.wording import mark

__all__ = [
    "Area",
    "Bundle",
    "Clear",
    "Instruction",
    "Show",
    "Stream",
    "Write",
    "align",
    "combine",
    "is_figure",
    "plain_text",
]

Stream = Literal["stdout", "stderr"]

_IMAGES = ("image/png", "image/jpeg", "image/gif", "image/svg+xml")
_WIDGET = "application/vnd.jupyter.widget-view+json"


@dataclass(frozen=True)
class Bundle:
    """One rich display: MIME bundle and metadata, with a digest that says whether two are equal."""

    data: Mapping[str, Any]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""

    @classmethod
    def of(cls, data: Mapping[str, Any], metadata: Mapping[str, Any]) -> Bundle:
        """Make one, without what cannot work: a widget's comm ends on the engine."""
        if _WIDGET in data:
            data = {kind: value for kind, value in data.items() if kind != _WIDGET}
        # The image decides where there is one: the plain text beside it may hold an object's address.
        seen = {kind: data[kind] for kind in _IMAGES if kind in data} or data
        text = json.dumps(seen, sort_keys=True, default=str)
        return cls(
            dict(data), dict(metadata), hashlib.blake2b(text.encode(errors="replace"), digest_size=16).hexdigest()
        )


@dataclass(frozen=True)
class Write:
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


Instruction = Write | Show | Area | Clear


def is_figure(data: Mapping[str, Any]) -> bool:
    """Whether a bundle is one that is shown beside those of other replicas."""
    return "text/html" in data or any(kind in data for kind in _IMAGES)


def plain_text(data: Mapping[str, Any]) -> str | None:
    """The text of a bundle that is nothing but text, else None."""
    rich = set(data) - {"text/plain", _WIDGET}
    return str(data["text/plain"]) if not rich and "text/plain" in data else None


def align(sequences: Mapping[int, Sequence[Bundle]]) -> list[dict[int, Bundle]]:
    """Group the figures of all replicas, in an order that keeps each replica's own.

    Args:
        sequences: The figures of each replica, in the order in which it showed them.

    Returns:
        The groups, each {replica: figure}.
    """
    groups: list[dict[int, Bundle]] = []
    for replica in sorted(sequences):
        groups = _merge(groups, replica, sequences[replica])
    return groups


def _merge(groups: list[dict[int, Bundle]], replica: int, sequence: Sequence[Bundle]) -> list[dict[int, Bundle]]:
    before = [next(iter(group.values())).digest for group in groups]
    matcher = difflib.SequenceMatcher(None, before, [bundle.digest for bundle in sequence], autojunk=False)
    merged: list[dict[int, Bundle]] = []
    for _, first, last, start, end in matcher.get_opcodes():
        for offset in range(max(last - first, end - start)):
            group = dict(groups[first + offset]) if first + offset < last else {}
            if start + offset < end:
                group[replica] = sequence[start + offset]
            merged.append(group)
    return merged


def combine(group: Mapping[int, Bundle], total: int) -> Bundle:
    """What is displayed for a group: one figure where all are equal, else each with its replicas' mark.

    Args:
        group: {replica: figure}.
        total: Replicas of the program.
    """
    by_digest: dict[str, list[int]] = {}
    for replica in sorted(group):
        by_digest.setdefault(group[replica].digest, []).append(replica)
    if len(by_digest) == 1 and len(group) == total:
        return next(iter(group.values()))
    parts = [(mark(replicas), group[replicas[0]]) for replicas in by_digest.values()]
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
