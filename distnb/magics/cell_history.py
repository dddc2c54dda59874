"""The history of the cells that used the cluster: their strategies, durations and outcomes."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from distnb.notebook import compose

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionResult

    from distnb.widgets.front import Front

__all__ = ["HEADER", "CellHistory"]

HEADER = ("cell", "strategy", "replicas", "seconds", "outcome", "begins with")
_MOST = 1000
_LETTERS = 60


class CellHistory:
    """The latest cells in which programs ran on engines. The shell calls `begin` and `end` for each cell."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._rows: deque[tuple[str, ...]] = deque(maxlen=_MOST)
        self._began = 0.0
        self._program = 0
        self._text = ""

    def begin(self, raw_cell: str) -> None:
        """Begin a cell."""
        self._began, self._program, self._text = time.monotonic(), _latest_program(), raw_cell

    def end(self, result: ExecutionResult | None) -> None:
        """End a cell. `result` is None if a stop came between two of IPython's own steps."""
        session, title = compose.current(), self._front.title
        if session is None or not (title or _latest_program() > self._program):
            return
        seconds = f"{time.monotonic() - self._began:.2f}"
        number = "" if result is None or result.execution_count is None else str(result.execution_count)
        strategy = title or session.calls.latest_strategy
        self._rows.append(
            (number, strategy, str(len(session.status())), seconds, _outcome(result), _beginning(self._text))
        )

    def rows(self) -> list[tuple[str, ...]]:
        """Return a row for each cell with the columns of `HEADER`, the latest last."""
        return list(self._rows)


def _latest_program() -> int:
    session = compose.current()
    return session.latest_program if session is not None else 0


def _outcome(result: ExecutionResult | None) -> str:
    if result is None:
        return "interrupted"
    error = result.error_before_exec or result.error_in_exec
    if error is None:
        return "ok"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__


def _beginning(text: str) -> str:
    """Return the first line of a cell that is neither a comment nor a magic, or else its first line."""
    lines = [line.strip() for line in text.splitlines()]
    first = next((line for line in lines if line and not line.startswith(("%", "#"))), lines[0] if lines else "")
    return first if len(first) <= _LETTERS else f"{first[: _LETTERS - 1]}…"
