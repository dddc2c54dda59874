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
        usage: Its one-line form, shown in every complaint.
    """

    def __init__(self, magic: str, usage: str) -> None:
        super().__init__(prog=magic, usage=usage, add_help=False, allow_abbrev=False, exit_on_error=False)
        self._magic = magic
        self._usage_line = usage

    def error(self, message: str) -> NoReturn:
        """What argparse calls on bad input."""
        raise OptionError(f"{self._magic}: {message}. Usage: {self._usage_line}")

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
        if rest:
            self.error(f"{rest[0]!r} is not understood{closest(rest[0], self._options())}")
        return found

    def _options(self) -> list[str]:
        return [option for action in self._actions for option in action.option_strings]


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
