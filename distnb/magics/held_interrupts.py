"""Ctrl-C while a cell is about to begin: IPython drops what is raised then, and runs the cell all the same."""

from __future__ import annotations

import ast
from typing import Any

from distnb.session.interrupts import Interrupts

__all__ = ["HeldInterrupts"]


class HeldInterrupts(Interrupts, ast.NodeTransformer):
    """Holds SIGINT back while a callback of IPython's runs; as an AST transformer, raises it in place of the cell."""

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
