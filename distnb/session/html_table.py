"""A small HTML table that looks right in light and dark, trusted or not, saved or live."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

__all__ = ["html_table", "human_bytes"]

_CELL = "padding:1px 14px 1px 0;text-align:{align};border:none;background:none;white-space:nowrap"


def html_table(header: Sequence[str], rows: Iterable[Sequence[object]], *, numeric: Iterable[int] = ()) -> str:
    """Draw a table.

    Args:
        header: Titles of the columns.
        rows: Their cells; text is escaped.
        numeric: Columns that are aligned to the right.
    """
    right = set(numeric)

    def cells(tag: str, values: Sequence[object], style: str = "") -> str:
        styles = [_CELL.format(align="right" if i in right else "left") + style for i in range(len(values))]
        return "".join(
            f'<{tag} style="{own}">{html.escape(str(value))}</{tag}>' for own, value in zip(styles, values, strict=True)
        )

    head = cells("th", header, ";color:#808080;font-weight:normal")
    body = "".join(f'<tr style="background:none">{cells("td", row)}</tr>' for row in rows)
    style = "border-collapse:collapse;font-size:12px;margin:2px 0"
    return f'<table style="{style}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def human_bytes(nbytes: int | None) -> str:
    """A number of bytes as people read it: `1.2 GB`; nothing for None."""
    if nbytes is None:
        return ""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
