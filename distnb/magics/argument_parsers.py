"""Reading magic lines. Nonsense ends in one line that names the cure, never in SystemExit."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import Any, NoReturn

from distnb.errors import OptionError, closest

__all__ = ["LineParser", "closest", "parse_count"]


class LineParser(argparse.ArgumentParser):
    """argparse for a line of a notebook.

    Args:
        magic: How the magic is written, "%distnb start".
        about: What it does.
    """

    def __init__(self, magic: str, about: str) -> None:
        super().__init__(
            prog=magic,
            description=about[0].upper() + about[1:] + ("" if about.endswith(".") else "."),
            add_help=False,
            allow_abbrev=False,
            exit_on_error=False,
            formatter_class=_Formatter,
        )
        self._magic = magic
        self.about = about

    @property
    def usage_line(self) -> str:
        """All that it takes, in one line."""
        return " ".join(self.format_usage().split()).removeprefix("usage: ")

    def error(self, message: str) -> NoReturn:
        """What argparse calls on bad input."""
        usage = self.usage_line
        raise OptionError(
            f"{self._magic}: {message}. "
            + (f"Usage: {usage}" if len(usage) < 110 else f"{self._magic} -h shows its options.")
        )

    def read(self, line: str) -> argparse.Namespace:
        """Parse a line.

        Raises:
            OptionError: It makes no sense.
        """
        try:
            words = shlex.split(line)
        except ValueError as error:
            self.error(f"{line.strip()!r} cannot be read ({str(error).lower()})")
        try:
            found, rest = self.parse_known_args(words)
        except argparse.ArgumentError as error:
            self.error(str(error))
        if rest and not self.words():
            raise OptionError(f"{self._magic} takes nothing more and got {' '.join(rest)!r}.")
        if rest:
            self.error(f"{rest[0]!r} is not understood{closest(rest[0], self.words())}")
        return found

    def words(self) -> list[str]:
        """The names of its options."""
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        return [option for action in shown for option in action.option_strings]


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=84)


class parse_count(argparse.Action):
    """A whole number, at least one."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Check and keep the number."""
        text = str(values)
        if not text.isdigit() or int(text) < 1:
            parser.error(f"{option_string} {text}: give a whole number, 1 or more")
        setattr(namespace, self.dest, int(text))
