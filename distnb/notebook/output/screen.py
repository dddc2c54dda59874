"""What a replica's stream looks like, line by line: newlines, carriage returns, cursor moves.

A progress bar rewrites its line with a carriage return, nested bars move up and down. Rich's live displays hide the
cursor while they are there, and draw frames of several lines, each over the one before. A `Screen` follows one stream
of one replica and tells which lines are finished, and which are still being written.
"""

from __future__ import annotations

import re

__all__ = ["SETTLE_S", "Screen"]

SETTLE_S = 0.15
"""A line below which the cursor went stays open for this long if a bar was drawn in it: nested bars come back up."""

_HIDE, _SHOW = "\x1b[?25l", "\x1b[?25h"
_CONTROLS = re.compile("(\n|\r|\x08|\x1b\\[\\d*[AJK]|\x1b\\[\\?25[hl])")
_TERMINALS = re.compile("\x1b\\[(?!\\?25[hl])\\??[\\d;]*[B-HSTfhl]")  # what else terminals do: there is none here
_CUT = re.compile("\x1b(\\[\\??[\\d;]*)?$")  # an escape sequence of which the end has not come yet


class Screen:
    """The unfinished end of one stream of one replica.

    Attributes:
        rows: Lines not yet finished, the topmost first.
        since: When the oldest of them began.
        drawn: Something rewrote a row, as progress bars do.
    """

    def __init__(self) -> None:
        self._reset()
        self.since = 0.0

    def _reset(self) -> None:
        self.rows: list[str] = [""]
        self.drawn = False
        self._touched = [0.0]  # when the cursor was last in each row
        self._row = self._column = 0
        self._fresh = False  # the cursor has just come into a new line
        self._framed = False  # the cursor is hidden: what is below the top of the latest frame is drawn again
        self._held = ""
        self._done: list[str] = []

    @property
    def open(self) -> bool:
        """Whether anything unfinished is there."""
        return len(self.rows) > 1 or bool(self.rows[0])

    def feed(self, text: str, now: float) -> list[str]:
        """Take text as it was written; the lines that it finished, without their newlines."""
        if not self.open:
            self.since = now
        text = (self._held + text).replace("\r\n", "\n")
        cut = _CUT.search(text)
        self._held = cut[0] if cut else ""
        text = _TERMINALS.sub("", text[: len(text) - len(self._held)])
        for piece in filter(None, _CONTROLS.split(text)):
            self._put(piece, now)
        return self.settle(now)

    def settle(self, now: float) -> list[str]:
        """The lines that are finished by now: the cursor is below, and did not come back for a while."""
        count = 0
        while count < self._row and not self._framed and (not self.drawn or now - self._touched[count] >= SETTLE_S):
            count += 1
        self._cut_off(count, now)
        done, self._done = self._done, []
        return done

    def finish(self) -> list[str]:
        """The stream ends: every row is finished."""
        rows = [*self._done, *(row.rstrip() if self.drawn else row for row in self.rows)]
        while rows and not rows[-1]:
            rows.pop()
        self._reset()
        return rows

    def _cut_off(self, count: int, now: float) -> None:
        """The first so many rows are done."""
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
                # Plain text in a new line: were this a bar below others, it would begin with a carriage return. Or, of
                # frames, text where the cursor was moved to, which is the top of the next one.
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
