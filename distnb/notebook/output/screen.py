"""The lines of a replica's stream, as a terminal shows them: newlines, carriage returns and cursor moves are applied.

A progress bar rewrites its line with a carriage return, and nested bars move up and down. Rich's live displays hide the
cursor while they run, and draw frames of several lines over each other. A `Screen` follows one stream of one replica
and separates finished lines from unfinished ones. Example: after "10%\\r20%\\r", the unfinished line is "20%".
"""

from __future__ import annotations

import re

__all__ = ["REOPEN_S", "Screen"]

REOPEN_S = 0.15
"""The time for which a line with a bar stays open after the cursor went below it, since nested bars move up again."""

_HIDE, _SHOW = "\x1b[?25l", "\x1b[?25h"
_CONTROLS = re.compile("(\n|\r|\x08|\x1b\\[\\d*[AJK]|\x1b\\[\\?25[hl])")
_TERMINALS = re.compile("\x1b\\[(?!\\?25[hl])\\??[\\d;]*[B-HSTfhl]")  # other commands to terminals, which are ignored
_CUT = re.compile("\x1b(\\[\\??[\\d;]*)?$")  # an escape sequence whose end has not arrived yet


class Screen:
    """The unfinished end of one stream of one replica.

    Attributes:
        rows: The unfinished lines, the topmost first.
        since: The time at which the oldest of them began.
        drawn: True if text has been rewritten in a row, as by a progress bar.
    """

    def __init__(self) -> None:
        self._reset()
        self.since = 0.0

    def _reset(self) -> None:
        self.rows: list[str] = [""]
        self.drawn = False
        self._touched = [0.0]  # the time at which the cursor was last in each row
        self._row = self._column = 0
        self._fresh = False  # the cursor has just come to a new line
        self._framed = False  # the cursor is hidden, so the rows below the top of the latest frame will be drawn again
        self._held = ""
        self._done: list[str] = []

    @property
    def open(self) -> bool:
        """True if there is unfinished text."""
        return len(self.rows) > 1 or bool(self.rows[0])

    def feed(self, text: str, now: float) -> list[str]:
        """Apply text as it was written, and return the lines that it finished, without their newlines."""
        if not self.open:
            self.since = now
        text = (self._held + text).replace("\r\n", "\n")
        cut = _CUT.search(text)
        self._held = cut[0] if cut else ""
        text = _TERMINALS.sub("", text[: len(text) - len(self._held)])
        for piece in filter(None, _CONTROLS.split(text)):
            self._put(piece, now)
        return self.pop_finished(now)

    def pop_finished(self, now: float) -> list[str]:
        """Remove and return the finished lines: the cursor is below them, and did not move up for a while."""
        count = 0
        while count < self._row and not self._framed and (not self.drawn or now - self._touched[count] >= REOPEN_S):
            count += 1
        self._cut_off(count, now)
        done, self._done = self._done, []
        return done

    def finish(self) -> list[str]:
        """End the stream, and return all rows."""
        rows = [*self._done, *(row.rstrip() if self.drawn else row for row in self.rows)]
        while rows and not rows[-1]:
            rows.pop()
        self._reset()
        return rows

    def _cut_off(self, count: int, now: float) -> None:
        """Move the first `count` rows to the finished ones."""
        if count:
            self._done += [row.rstrip() if self.drawn else row for row in self.rows[:count]]
            del self.rows[:count], self._touched[:count]
            self._row -= count
            self.since = now
            self.drawn = self.drawn and any(self.rows)

    def _put(self, piece: str, now: float) -> None:
        self._touched[self._row] = now
        fresh, self._fresh = self._fresh, piece == "\n"
        if piece == "\n":
            self._go(self._row + 1, now)
            self._column = 0
        elif piece == "\r":
            self._column, self.drawn = 0, True
        elif piece == "\x08":
            self._column = max(0, self._column - 1)
        elif piece in (_HIDE, _SHOW):
            self._framed = piece == _HIDE
        elif _CONTROLS.fullmatch(piece) and piece[-1] == "A":
            self.drawn = True
            self._go(max(0, self._row - int(piece[2:-1] or 1)), now)
        elif _CONTROLS.fullmatch(piece):
            self.rows[self._row] = self.rows[self._row][: self._column]
        else:
            if fresh != self._framed and (self._framed or self.rows[self._row :] == [""]):
                # Plain text in a new line finishes the lines above: a bar below others would begin with a carriage
                # return. In frames it is the reverse. Text after a cursor move is the top of the next frame.
                self._cut_off(self._row, now)
            self._type(piece)

    def _type(self, text: str) -> None:
        row = self.rows[self._row]
        self.drawn = self.drawn or self._column < len(row)
        self.rows[self._row] = row[: self._column].ljust(self._column) + text + row[self._column + len(text) :]
        self._column += len(text)

    def _go(self, row: int, now: float) -> None:
        if row == len(self.rows):
            self.rows.append("")
            self._touched.append(now)
        self._row = row
        self._touched[row] = now
