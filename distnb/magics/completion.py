"""Tab: words of the magics. Names of the notebook complete by themselves, and handles know their attributes."""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher

from distnb.magics.request import WORDS
from distnb.values import DistributedValues

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["Completion", "warm_up"]

_LINE = re.compile(r"^(?:(%%distribute)|(%distnb))[ \t]+(?P<before>(?:\S+[ \t]+)*)(?P<word>\S*)$")
_OPTIONS = {
    "%%distribute": ("-n", "--devices", "--gradients", "--oversubscribe"),
    "start": (
        *("-n", "--devices", "--oversubscribe", "--hosts", "--per-host", "--interface", "--ssh-args"),
        *("--launcher", "--launcher-args", "--resolver", "--secret"),
    ),
    "restart": ("--missing",),
    "output": ("--save",),
    "live": ("auto", "widget", "picture", "text", "off"),
}


class Completion:
    """Matchers of one shell.

    Args:
        shell: IPython's.
        commands: Of `%distnb`.
    """

    def __init__(self, shell: InteractiveShell, commands: Iterable[str]) -> None:
        self._shell = shell
        self._commands = tuple(commands)

        # IPython marks matchers by attributes, which a bound method cannot have.
        @context_matcher(identifier="distnb")  # type: ignore[untyped-decorator]
        def matcher(context: CompletionContext) -> SimpleMatcherResult:
            return self.words(context)

        self._matcher = matcher

    def install(self) -> None:
        """Let IPython ask here too."""
        self._shell.Completer.custom_matchers.append(self._matcher)

    def remove(self) -> None:
        """Let it not."""
        matchers = self._shell.Completer.custom_matchers
        matchers[:] = [matcher for matcher in matchers if matcher is not self._matcher]

    def words(self, context: CompletionContext) -> SimpleMatcherResult:
        """What fits at the cursor in a line of one of our magics."""
        line = context.line_with_cursor[: context.cursor_position]
        match = _LINE.match(line)
        found = self._candidates(match[1] or match[2], match["before"].split(), match["word"]) if match else []
        return {"completions": [SimpleCompletion(word, type="magic") for word in found], "suppress": bool(found)}

    def _candidates(self, magic: str, before: list[str], word: str) -> list[str]:
        if before:
            known: Iterable[str] = _OPTIONS.get(magic if magic == "%%distribute" else before[0], ())
            if before[-1] == "--gradients":
                known = ("sum", "mean")
        elif magic == "%%distribute":
            known = (*WORDS, *self._strategies())
        else:
            known = self._commands
        return [each for each in known if each.startswith(word)]

    def _strategies(self) -> list[str]:
        return [name for name, value in list(self._shell.user_ns.items()) if _is_strategy(value)]


def _is_strategy(value: Any) -> bool:
    # A handle's attributes may be on an engine: its class alone is looked at.
    return not isinstance(value, DistributedValues) and any(
        base.__name__ == "Strategy" and base.__module__.startswith("distnb.") for base in type(value).__mro__
    )


def warm_up() -> None:
    """Make the first Tab fast: Jedi takes seconds to load, and JupyterLab gives up after one."""

    def load() -> None:
        # Loaded only, and not used: Jedi is not thread-safe, and a Tab that came meanwhile would find nothing.
        # The widget is loaded too, so that the first live view appears at once.
        for name in ("jedi.api.interpreter", "jedi.inference.gradual.typeshed", "distnb.widgets.widget_view"):
            try:
                importlib.import_module(name)
            except ImportError:
                continue

    threading.Thread(target=load, name="distnb-warm-up", daemon=True).start()
