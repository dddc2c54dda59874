"""Ctrl-C while a cell is about to begin: IPython drops what its callbacks raise, and runs the cell all the same."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distnb.notebook.interrupts import Interrupts

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["HeldInterrupts"]

_BEFORE_A_CELL = frozenset({"pre_execute", "pre_run_cell"})


class HeldInterrupts(Interrupts, ast.NodeTransformer):
    """Holds SIGINT back while callbacks of IPython's run; as an AST transformer, raises it in place of the cell."""

    _anew = False  # there are callbacks of several events before a cell, and it is told after all of them

    def install(self, shell: InteractiveShell, first: Callable[[], None]) -> None:
        """Hold it back in all callbacks before a cell, also those of others.

        Args:
            shell: IPython's.
            first: Done before them; SIGINT raises in it.
        """
        shell.ast_transformers.insert(0, self)
        trigger = shell.events.trigger

        def held(event: str, *args: Any, **kwargs: Any) -> None:
            if event not in _BEFORE_A_CELL:
                trigger(event, *args, **kwargs)
                return
            first()
            with self:
                trigger(event, *args, **kwargs)

        shell.events.trigger = held  # type: ignore[method-assign]

    def remove(self, shell: InteractiveShell) -> None:
        """Leave the shell as it was."""
        shell.ast_transformers[:] = [each for each in shell.ast_transformers if each is not self]
        del shell.events.trigger  # the class has its own
        self.close()

    def visit(self, node: ast.AST) -> Any:
        """The cell, once the callbacks before it are through.

        Raises:
            KeyboardInterrupt: The user wanted it to end meanwhile.
        """
        if self.take():
            raise KeyboardInterrupt
        return node

    def _ended(self) -> None:
        """Nothing: a callback has ended. The cell, or what follows it, is told."""
