"""Tab completion of the words of the magics.

IPython itself completes the notebook's names. A handle's `__dir__` provides the attributes of its object.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from IPython.core.completer import Completion

from distnb.magics.cell_request import is_strategy
from distnb.magics.commands import COMMANDS, DISTRIBUTE, LIVE_MODES
from distnb.notebook import compose
from distnb.strategies import WORDS

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["complete"]

_LINE = re.compile(r"^(?:(%%distribute)|(%distnb|%autodistribute))[ \t]+(?P<before>(?:\S+[ \t]+)*)(?P<word>\S*)$")


def complete(shell: InteractiveShell) -> None:
    """Make Tab complete the words of the magics, and suppress the output of its requests to handles."""
    completer = shell.Completer
    original = completer.completions

    def completions(text: str, offset: int) -> Iterator[Completion]:
        match = _LINE.match(text[:offset].rpartition("\n")[2])
        known = _known(match[1] or match[2], match["before"].split(), shell.user_ns) if match else ()
        words = [word for word in known if match and word.startswith(match["word"])]
        if match and words:
            yield from (Completion(offset - len(match["word"]), offset, word, type="magic") for word in words)
            return
        session = compose.current()
        with session.programs.inspecting() if session is not None else nullcontext():
            found = list(original(text, offset))  # complete now, because a later read would be outside of the block
        yield from found

    completer.completions = completions  # type: ignore[method-assign]


def _known(magic: str, before: list[str], user_ns: Mapping[str, Any]) -> Iterable[str]:
    """Return the possible next words in a line of a magic."""
    if magic == "%autodistribute" and not before:
        return ["off", *_known("%%distribute", before, user_ns)]
    if magic != "%distnb":
        if before:
            return ("sum", "mean") if before[-1] == "--gradients" else DISTRIBUTE.words()
        return [*WORDS, *(name for name, value in list(user_ns.items()) if is_strategy(value))]
    if not before:
        return COMMANDS
    if before[0] == "live":
        return [*LIVE_MODES, *COMMANDS["live"].words()]
    return COMMANDS[before[0]].words() if before[0] in COMMANDS else ()
