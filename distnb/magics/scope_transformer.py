"""`with strategy.scope():` at the top level of an ordinary cell: its body runs on the replicas.

The AST transformer rewrites every top-level `with` that calls some `.scope()`, and whether a remote strategy is
meant is decided when the cell runs:

    with strategy.scope() as s:      →      if get_ipython()._distnb_scope(strategy.scope(), 1, 2):
        body                                    pass
                                            else:
                                                with get_ipython()._distnb_scope.taken as s:
                                                    body
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distnb.magics.presenting import presented
from distnb.options import StrategySpec

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["RunInScope", "ScopeDispatch", "ScopeTransformer"]

RunInScope = Callable[[str, StrategySpec, str], None]
"""Runs a source text in the scope of a strategy on the replicas: (source, spec, filename)."""


class ScopeTransformer(ast.NodeTransformer):
    """Rewrites the top level of a cell; whatever lies deeper is left alone."""

    def visit_Module(self, node: ast.Module) -> ast.Module:
        """The cell."""
        node.body = [self._rewritten(each) if isinstance(each, ast.With) else each for each in node.body]
        return node

    def visit(self, node: ast.AST) -> Any:
        """IPython calls this with the module, and %%time with what it compiles."""
        return self.visit_Module(node) if isinstance(node, ast.Module) else node

    def _rewritten(self, node: ast.With) -> ast.stmt:
        scope = next((item for item in node.items if _calls_scope(item.context_expr)), None)
        if scope is None:
            return node
        text = ast.Constant(ast.unparse(node))  # for where the cell's own text cannot be found
        span = [ast.Constant(node.lineno), ast.Constant(node.end_lineno)]
        dispatch = ast.parse("get_ipython()._distnb_scope", mode="eval").body
        test = ast.Call(func=dispatch, args=[scope.context_expr, *span, text], keywords=[])
        scope.context_expr = ast.parse("get_ipython()._distnb_scope.taken", mode="eval").body
        for part in (test, scope.context_expr):
            for each in ast.walk(part):
                if not hasattr(each, "lineno"):
                    continue
                ast.copy_location(each, node)
        branch = ast.If(test=test, body=[ast.copy_location(ast.Pass(), node)], orelse=[node])
        return ast.fix_missing_locations(ast.copy_location(branch, node))


def _calls_scope(expression: ast.expr) -> bool:
    return (
        isinstance(expression, ast.Call)
        and isinstance(expression.func, ast.Attribute)
        and expression.func.attr == "scope"
        and not expression.args
        and not expression.keywords
    )


class ScopeDispatch:
    """Decides, when the cell runs, where the body belongs.

    Args:
        run: Runs a text on the replicas.
    """

    taken: Any = None
    """The context manager that was evaluated, for the branch that enters it here."""

    def __init__(self, run: RunInScope) -> None:
        self._run = run

    def install(self, shell: InteractiveShell) -> None:
        """Make it reachable from cells."""
        shell._distnb_scope = self  # type: ignore[attr-defined]

    def __call__(self, scope: Any, first: int, last: int, unparsed: str) -> bool:
        """Run the statement on the replicas if that is where the scope is.

        Args:
            scope: What the context expression gave.
            first, last: The statement's lines.
            unparsed: The statement, should its lines not be found.

        Returns:
            Whether it was run.
        """
        remote = sys.modules.get("distnb.session.remote")
        if remote is None or not isinstance(scope, remote.RemoteScope):
            self.taken = scope
            return False
        filename = sys._getframe(1).f_code.co_filename
        lines = linecache.getlines(filename)[first - 1 : last]
        source = "\n" * (first - 1) + "".join(lines) if _holds(lines) else unparsed
        with presented():
            self._run(source, scope.strategy.spec, filename)
        return True


def _holds(lines: list[str]) -> bool:
    """Whether these are the statement's lines: `with` stands at their beginning, and nothing before or behind it."""
    try:
        body = ast.parse("".join(lines)).body
    except SyntaxError:
        return False
    return len(body) == 1 and isinstance(body[0], ast.With)
