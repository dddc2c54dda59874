"""`distnb.timeline`: the time of the replicas' latest steps, to show, to compute with, and to save."""

from __future__ import annotations

import html
import json
import os
from pathlib import Path
from typing import Any

from distnb.errors import OptionError, ProgramError
from distnb.notebook import compose
from distnb.views.crowds import MOST_SHOWN, noteworthy, others, unlikeness
from distnb.views.timeline_model import KINDS, Piece, Spent, TimelineModel, sentence
from distnb.views.wording import filled, html_table, text_table
from distnb.widgets.picture import as_image
from distnb.widgets.timeline_picture import gantt_picture

__all__ = ["Timeline", "timeline"]


class Timeline:
    """The time of each replica in the latest steps: a picture in a notebook, a table in a terminal.

    Attributes:
        rows: The pieces of each replica's time, in seconds from the beginning of the first piece.
        spent: The time by kind, and the straggler; None if nothing has been measured.
    """

    rows: list[Piece]
    spent: Spent | None

    def __init__(self, model: TimelineModel, steps: int) -> None:
        self.spent = model.spent(steps)
        pieces, ends = model.pieces(steps)
        zero = pieces[0].begin if pieces else 0.0
        self.rows = [each._replace(begin=each.begin - zero, end=each.end - zero) for each in pieces]
        self._ends = [(at - zero, number) for at, number in ends]

    def to_frame(self) -> Any:
        """Return the rows as a DataFrame. Raises ImportError if pandas is not installed."""
        import pandas as pd

        return pd.DataFrame(self.rows, columns=Piece._fields)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a Chrome trace and return its path. https://ui.perfetto.dev and chrome://tracing can open the file."""
        events: list[dict[str, Any]] = []
        for replica in sorted({each.replica for each in self.rows}):
            name = {"name": "process_name", "ph": "M", "pid": replica, "args": {"name": f"replica {replica}"}}
            events += [name, {**name, "name": "thread_name", "tid": 0, "args": {"name": "main thread"}}]
        for each in self.rows:
            args: dict[str, Any] = {"line": each.where} if each.where else {}
            if each.number:
                args["collective number"] = each.number
            title = each.what if each.what and each.kind == "communication" else each.kind
            span = {"ts": each.begin * 1e6, "dur": (each.end - each.begin) * 1e6, "pid": each.replica, "tid": 0}
            events.append({"name": title, "cat": each.kind, "ph": "X", **span, "args": args})
        first = min((each.replica for each in self.rows), default=0)
        for at, number in self._ends:
            events.append(
                {"name": f"end of step {number}", "ph": "i", "s": "g", "ts": at * 1e6, "pid": first, "tid": 0}
            )
        place = Path(path).expanduser()
        place.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
        return place

    @property
    def text(self) -> str:
        """The breakdown of the time in words."""
        return sentence(self.spent) if self.spent is not None else "Nothing has been measured."

    def _table(self) -> tuple[list[str], list[list[str]]]:
        header = ["replica", *(f"{kind}, ms" for kind in KINDS)]
        if self.spent is None:
            return header, []
        steps, seconds = self.spent.steps or 1, self.spent.seconds
        chosen = noteworthy(unlikeness({replica: own["waiting"] for replica, own in seconds.items()}))
        milliseconds = {replica: {kind: seconds[replica][kind] / steps * 1e3 for kind in KINDS} for replica in chosen}
        rows = [
            [
                str(replica),
                *(f"{spent:,.0f}" if spent >= 100 else f"{spent:.3g}" if spent else "" for spent in own.values()),
            ]
            for replica, own in milliseconds.items()
        ]
        return filled(header, rows)

    @property
    def _others(self) -> str:
        """A text about the replicas that the table does not show; "" if it shows all."""
        if self.spent is None:
            return ""
        total = len(self.spent.seconds)
        more = others(min(total, MOST_SHOWN), total)
        return f"{more}, which differ less; `rows` and `to_frame()` have all" if more else ""

    def __repr__(self) -> str:
        header, rows = self._table()
        lines = text_table(header, rows, numeric=header) if rows else []
        return "\n".join(filter(None, [self.text, *lines, self._others]))

    def _repr_html_(self) -> str:
        header, rows = self._table()
        text = f'<div style="font-size:13px">{html.escape(self.text)}</div>'
        if not rows:
            return text
        picture = as_image(gantt_picture(self.rows, self._ends), self.text, wide=True)
        more = f'<div style="color:#808080;font-size:12px">{html.escape(self._others)}</div>' if self._others else ""
        return f"{picture}{text}{html_table(header, rows, numeric=header)}{more}"


def timeline(steps: int = 10) -> Timeline:
    """Return a breakdown of the time of the replicas' latest training steps. Call it in the notebook.

    Every replica records its latest few thousand waits, so nothing needs to be enabled beforehand.

    Args:
        steps: The number of the latest steps to include. If no step was counted, everything recorded is included.

    Raises:
        NoClusterError: No cluster runs.
        OptionError: `steps` is not a positive whole number.
        ProgramError: No replica has run anything yet, or all are too busy to reply.

    Example:
        >>> import distnb
        >>> distnb.timeline().save("trace.json")        # doctest: +SKIP
    """
    if not isinstance(steps, int) or steps < 1:
        raise OptionError(f"timeline(steps={steps!r}): `steps` must be a whole number. Give 1 or more.")
    model = compose.require().timeline(steps)
    if not model.replicas:
        raise ProgramError(
            "There is no timeline: no replica has run anything yet, or none replies. Run a distributed cell first."
        )
    return Timeline(model, steps)
