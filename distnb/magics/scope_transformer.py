"""`with strategy.scope():` in the notebook's own code: its block runs on the replicas.

The AST transformer rewrites every `with` of a cell that calls some `.scope()`. Whether a remote strategy is meant is
decided when it runs. At the top level of a cell, and in its `if`, `for` and `try` statements:

    with strategy.scope() as s:      →      if get_ipython()._distnb_scope(strategy.scope(), 1, 2, …):
        body                                    pass
                                            else:
                                                with get_ipython()._distnb_scope.taken as s:
                                                    body

In a function the block gets the locals that it reads, and those that it assigns are bound after it. A function may run
on a replica, where IPython knows nothing of this: so it asks the scope first.

    with strategy.scope() as s:      →      _scope_ = strategy.scope()
        body                                if hasattr(_scope_, "is_remote"):
                                                get_ipython()._distnb_scope.hand_over(_scope_, 1, 2, …)
                                                if "model" in get_ipython()._distnb_scope.bound:
                                                    model = get_ipython()._distnb_scope.bound["model"]
                                            else:
                                                with _scope_ as s:
                                                    body
"""

from __future__ import annotations

import ast
import linecache
import sys
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distnb.errors import ContextError
from distnb.magics.presenting import presented
from distnb.options import StrategySpec

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["RunInScope", "ScopeDispatch", "ScopeTransformer"]

RunInScope = Callable[[str, StrategySpec, str], None]
"""Runs a source text in the scope of a strategy on the replicas: (source, spec, filename)."""

_GIVEN, _MADE, _BLOCK = "_given_", "_made_", "_block_"
"""What locals of a function, and the block, are called where the block runs."""


class ScopeTransformer(ast.NodeTransformer):
    """Rewrites what IPython compiles: a cell, or a function that `%%time` and its like have in hand."""

    def __init__(self) -> None:
        self._functions: list[ast.FunctionDef | ast.AsyncFunctionDef] = []

    def visit(self, node: ast.AST) -> Any:
        """Every statement; expressions hold no `with`."""
        return node if isinstance(node, ast.expr) else super().visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        """The body of a class has names of its own: only its methods are looked into."""
        for each in node.body:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                self.visit(each)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """A function: the block's names are its locals."""
        self._functions.append(node)
        self.generic_visit(node)
        self._functions.pop()
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AsyncFunctionDef:
        """A function that awaits."""
        self._functions.append(node)
        self.generic_visit(node)
        self._functions.pop()
        return node

    def visit_With(self, node: ast.With) -> Any:
        """The statement that is meant."""
        scope = next((item for item in node.items if _calls_scope(item.context_expr)), None)
        if scope is None:
            return self.generic_visit(node)
        block = _Block(node, self._functions[-1] if self._functions else None)
        # For where the cell's own text cannot be found.
        about = f"{node.lineno}, {node.end_lineno}, {ast.unparse(node)!r}, {block.leaves!r}"
        made = scope.context_expr
        if not self._functions:
            branch = ast.parse(f"if get_ipython()._distnb_scope(None, {about}):\n    pass").body[0]
            assert isinstance(branch, ast.If)
            assert isinstance(branch.test, ast.Call)
            branch.test.args[0] = made
            statements: list[ast.stmt] = [branch]
            scope.context_expr = ast.parse("get_ipython()._distnb_scope.taken", mode="eval").body
        else:
            lines = [f"get_ipython()._distnb_scope.hand_over(_scope_, {about}, {sorted(block.names)})"]
            for name in sorted(block.stores):
                lines += [f"if {name!r} in get_ipython()._distnb_scope.bound:"]
                lines += [f"    {name} = get_ipython()._distnb_scope.bound[{name!r}]"]
            text = textwrap.indent("\n".join(lines), "    ")
            statements = ast.parse(f"_scope_ = None\nif hasattr(_scope_, 'is_remote'):\n{text}").body
            assignment, branch = statements
            assert isinstance(assignment, ast.Assign)
            assert isinstance(branch, ast.If)
            assignment.value = made
            scope.context_expr = ast.Name("_scope_", ast.Load())
        for part in (*statements, scope.context_expr):
            for each in ast.walk(part):
                if isinstance(each, ast.stmt | ast.expr):
                    ast.copy_location(each, node)
        self.generic_visit(node)
        branch.orelse = [node]
        return statements


class _Block(ast.NodeVisitor):
    """What the block of a `with` does with names.

    Args:
        node: The statement.
        function: The function that it stands in.

    Attributes:
        names: Every name in it.
        stores: Those that it assigns, its inner functions and classes excepted.
        leaves: The word for what in it belongs to the code around, and cannot be sent: "return", say; "" if nothing.
    """

    def __init__(self, node: ast.With, function: ast.FunctionDef | ast.AsyncFunctionDef | None) -> None:
        self.names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        self.stores: set[str] = set()
        self.leaves = ""
        self._loops = 0
        super().generic_visit(node)
        declared = {name for each in ast.walk(function or node) if isinstance(each, ast.Global) for name in each.names}
        if function is not None and not self.stores.isdisjoint(declared):
            self.leaves = "global"
        if any(isinstance(each, ast.Nonlocal) for each in ast.walk(node)):
            self.leaves = "nonlocal"

    def generic_visit(self, node: ast.AST) -> None:
        word = _LEAVING.get(type(node))
        if word is not None and not (self._loops and word in ("break", "continue")):
            self.leaves = word
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            self.stores.add(node.id)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Del):
            self.leaves = "del"
        elif isinstance(node, ast.alias):
            self.stores.add((node.asname or node.name).partition(".")[0])
        elif (isinstance(node, ast.MatchAs | ast.MatchStar) and node.name is not None) or isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        ):
            self.stores.add(str(node.name))
        if isinstance(node, _INNER):
            return
        loop = isinstance(node, ast.For | ast.AsyncFor | ast.While)
        self._loops += loop
        super().generic_visit(node)
        self._loops -= loop


_LEAVING: dict[type[ast.AST], str] = {
    ast.Return: "return",
    ast.Break: "break",
    ast.Continue: "continue",
    ast.Yield: "yield",
    ast.YieldFrom: "yield",
}
_INNER = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Lambda,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)


def _calls_scope(expression: ast.expr) -> bool:
    return (
        isinstance(expression, ast.Call)
        and isinstance(expression.func, ast.Attribute)
        and expression.func.attr == "scope"
        and not expression.args
        and not expression.keywords
    )


class ScopeDispatch:
    """Decides, when the code runs, where the block belongs.

    Args:
        run: Runs a text on the replicas.
    """

    taken: Any = None
    """The context manager that was evaluated, for the branch that enters it here."""

    def __init__(self, run: RunInScope) -> None:
        self._run = run
        self.bound: dict[str, Any] = {}

    def install(self, shell: InteractiveShell) -> None:
        """Make it reachable from cells."""
        shell._distnb_scope = self  # type: ignore[attr-defined]

    def __call__(self, scope: Any, first: int, last: int, unparsed: str, leaves: str) -> bool:
        """Run a statement of a cell on the replicas if that is where the scope is.

        Args:
            scope: What the context expression gave.
            first, last: The statement's lines.
            unparsed: The statement, should its lines not be found.
            leaves: What in it belongs to the code around.

        Returns:
            Whether it was run.
        """
        remote = sys.modules.get("distnb.notebook.remote_runtime")
        if remote is None or not isinstance(scope, remote.RemoteScope):
            self.taken = scope
            return False
        # A `return` and the like of a function that is defined in the block is its own.
        _refuse(leaves if leaves in ("break", "continue") else "")
        filename = sys._getframe(1).f_code.co_filename
        source, indent = _lines(filename, first, last, unparsed)
        if indent:
            source = "\n" * (first - 2) + "if True:\n" + source
        else:
            source = "\n" * (first - 1) + source if source != unparsed else source
        with presented():
            self._run(source, scope.strategy.spec, filename)
        return True

    def hand_over(self, scope: Any, first: int, last: int, unparsed: str, leaves: str, names: list[str]) -> None:
        """Run a statement of a function on the replicas; what it assigned is `bound` then.

        Args:
            scope: A remote scope.
            first, last, unparsed, leaves: As above.
            names: Names in the statement: those that are the function's locals go along.
        """
        _refuse(leaves)
        frame = sys._getframe(1)
        user_ns, here = frame.f_globals, frame.f_locals
        given = {_GIVEN + name: here[name] for name in names if name in here}
        filename = frame.f_code.co_filename
        statement, indent = _lines(filename, first, last, unparsed)
        if not indent:
            statement, indent = textwrap.indent(unparsed, "    ") + "\n", "    "
        node = ast.parse("if True:\n" + statement).body[0]
        assert isinstance(node, ast.If)
        assert isinstance(node.body[0], ast.With)
        stores = sorted(_Block(node.body[0], None).stores)
        head = ", ".join(f"{name}={_GIVEN}{name}" for name in names if _GIVEN + name in given)
        tail = [f"{indent}global {', '.join(_MADE + name for name in stores)}"] if stores else []
        for name in stores:
            tail += [f"{indent}try:", f"{indent}    {_MADE}{name} = {name}"]
            tail += [f"{indent}except NameError:", f"{indent}    pass"]
        text = "\n" * (first - 2) + f"def {_BLOCK}({head}):\n{statement}" + "\n".join([*tail, f"{_BLOCK}()", ""])
        self.bound.clear()
        user_ns.update(given)
        try:
            with presented():
                self._run(text, scope.strategy.spec, filename)
        finally:
            for name in given:
                user_ns.pop(name, None)
            user_ns.pop(_BLOCK, None)
            made = {name: user_ns.pop(_MADE + name) for name in stores if _MADE + name in user_ns}
        self.bound.update(made)


def _refuse(leaves: str) -> None:
    if leaves:
        raise ContextError(
            f"The block of `with strategy.scope():` runs on the replicas, and holds a `{leaves}` that belongs to the "
            "code around it, which does not. The cure: put the whole code in a %%distribute cell, or the statement "
            "behind the block."
        )


def _lines(filename: str, first: int, last: int, unparsed: str) -> tuple[str, str]:
    """A statement's text and its indentation; as it is unparsed if its lines are not these."""
    lines = linecache.getlines(filename)[first - 1 : last]
    text = "".join(lines)
    text += "" if text.endswith("\n") else "\n"
    indent = text[: len(text) - len(text.lstrip(" \t"))]
    try:
        body = ast.parse("if True:\n" + text if indent else text).body
    except SyntaxError:
        return unparsed, ""
    if indent:
        assert isinstance(body[0], ast.If)
        body = body[0].body if len(body) == 1 else []
    return (text, indent) if len(body) == 1 and isinstance(body[0], ast.With) else (unparsed, "")
