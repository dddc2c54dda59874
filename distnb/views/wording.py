"""The wording of sets, sizes, cells and tables for users."""

from __future__ import annotations

import html
from collections.abc import Collection, Iterable, Sequence

__all__ = [
    "Html",
    "cell_place",
    "duration",
    "filled",
    "html_table",
    "human_bytes",
    "mark",
    "note_html",
    "ranges",
    "short_duration",
    "short_number",
    "text_table",
    "whole_number",
]

_CELL = "padding:1px 14px 1px 0;text-align:{align};vertical-align:top;border:none;background:none;white-space:nowrap"


class Html(str):
    """Text that is HTML already and goes into a table unescaped."""

    __slots__ = ()


def ranges(numbers: Iterable[int]) -> list[str]:
    """Return the ranges of a set of numbers: "0-2" and "5" for 0, 1, 2 and 5."""
    spans: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1] = spans[-1][0], number
        else:
            spans.append((number, number))
    return [str(first) if first == last else f"{first}-{last}" for first, last in spans]


def mark(replicas: Iterable[int], who: str = "") -> str:
    """Return the mark of a set of replicas: `[0-3]`, `[0,2]`, `[1]`; with `who`, `[worker 1]`."""
    return f"[{who}{','.join(ranges(replicas))}]"


def cell_place(place: str) -> str:
    """Return a line as views name it: "cell 3, line 4" for "Cell In[3], line 4"."""
    return place.replace("Cell In[", "cell ", 1).replace("], line", ", line", 1)


def human_bytes(nbytes: int | None) -> str:
    """Return a number of bytes in words: `1.2 GB`; "" for None."""
    if nbytes is None:
        return ""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def whole_number(value: float) -> str:
    """Return a number as `1,204`; "" for 0."""
    return f"{value:,.0f}" if value else ""


def duration(seconds: float) -> str:
    """Return a time in words: `12.3 s`, `4 min 07 s`."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def note_html(text: str) -> str:
    """Return a note below a table as HTML, or "" without a text."""
    return f'<div style="color:#808080;font-size:12px">{html.escape(text)}</div>' if text else ""


def html_table(
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    numeric: Collection[str] = (),
    caption: str = "",
) -> str:
    """Return a table in HTML. Cells are escaped, except `Html`.

    Args:
        numeric: The titles of the columns that are aligned to the right.
        caption: A text above the table.
    """

    def cells(tag: str, values: Sequence[object]) -> str:
        drawn = []
        for title, value in zip(header, values, strict=True):
            style = _CELL.format(align="right" if title in numeric else "left")
            if tag == "th":
                style += ";color:#808080;font-weight:normal"
            text = value if isinstance(value, Html) else html.escape(str(value))
            drawn.append(f'<{tag} style="{style}">{text}</{tag}>')
        return "".join(drawn)

    body = "".join(f'<tr style="background:none">{cells("td", row)}</tr>' for row in rows)
    above = f'<div style="color:#808080;font-size:12px">{html.escape(caption)}</div>' if caption else ""
    style = "border-collapse:collapse;font-size:12px;margin:2px 0"
    head = f"<thead><tr>{cells('th', header)}</tr></thead>"
    return f'{above}<table style="{style}">{head}<tbody>{body}</tbody></table>'


def text_table(header: Sequence[str], rows: Iterable[Sequence[object]], *, numeric: Collection[str] = ()) -> list[str]:
    """Return the lines of a table as text, with the columns of these titles aligned to the right."""
    cells = [list(map(str, row)) for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    aligned = [str.rjust if title in numeric else str.ljust for title in header]
    return ["  ".join(map(lambda align, *of: align(*of), aligned, row, widths)).rstrip() for row in cells]


def short_number(value: float | None) -> str:
    """Return a number as a short text: 0.1235, 12345, 1.23e+06."""
    if value is None:
        return ""
    if 1_000 <= abs(value) < 100_000:
        return f"{value:.0f}"
    return f"{value:.3g}" if abs(value) >= 100_000 else f"{value:.4g}"


def short_duration(seconds: float) -> str:
    """Return the duration of a part of a step: 31 ms, 1.24 s."""
    if seconds < 0.000_95:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.995:
        return f"{seconds * 1e3:.2g} ms" if seconds < 0.00995 else f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.3g} s"


def filled(header: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Return a table without the columns that are empty in all rows."""
    columns = [i for i in range(len(header)) if any(row[i] for row in rows)]
    return [header[i] for i in columns], [[row[i] for i in columns] for row in rows]
