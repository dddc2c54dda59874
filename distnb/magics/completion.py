"""Tab: words of the magics. Names of the notebook complete by themselves, and handles know their attributes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher

from distnb.magics.cell_request import WORDS, is_strategy
from distnb.magics.commands import COMMANDS, DISTRIBUTE, LIVE_MODES
from distnb.notebook import compose

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["Completion"]

_LINE = re.compile(r"^(?:(%%distribute)|(%distnb))[ \t]+(?P<before>(?:\S+[ \t]+)*)(?P<word>\S*)$")


class Completion:
    """Matchers of one shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell

        # IPython marks matchers by attributes, which a bound method cannot have.
        @context_matcher(identifier="distnb")  # type: ignore[untyped-decorator]
        def matcher(context: CompletionContext) -> SimpleMatcherResult:
            return self.words(context)

        self._matcher = matcher

    def install(self) -> None:
        """Let IPython ask here too."""
        completer = self._shell.Completer
        completer.custom_matchers.append(self._matcher)
        plainly = completer.completions

        def completions(text: str, offset: int) -> Iterator[Any]:
            session = compose.current()
            with session.looking() if session is not None else nullcontext():
                found = list(plainly(text, offset))  # all of it now: who reads on later is not within any more
            yield from found

        completer.completions = completions  # type: ignore[method-assign]

    def remove(self) -> None:
        """Let it not."""
        self._shell.Completer.__dict__.pop("completions", None)
        matchers = self._shell.Completer.custom_matchers
        matchers[:] = [matcher for matcher in matchers if matcher is not self._matcher]

    def words(self, context: CompletionContext) -> SimpleMatcherResult:
        """What fits at the cursor in a line of one of our magics."""
        line = context.line_with_cursor[: context.cursor_position]
        match = _LINE.match(line)
        found = self._candidates(match[1] or match[2], match["before"].split(), match["word"]) if match else []
        return {"completions": [SimpleCompletion(word, type="magic") for word in found], "suppress": bool(found)}

    def _candidates(self, magic: str, before: list[str], word: str) -> list[str]:
        known: Iterable[str] = COMMANDS
        if magic == "%%distribute":
            known = DISTRIBUTE.words() if before else (*WORDS, *self._strategies())
            if before and before[-1] == "--gradients":
                known = ("sum", "mean")
        elif before:
            parser = COMMANDS.get(before[0])
            known = LIVE_MODES if before[0] == "live" else parser.words() if parser is not None else ()
        return [each for each in known if each.startswith(word)]

    def _strategies(self) -> list[str]:
        return [name for name, value in list(self._shell.user_ns.items()) if is_strategy(value)]
