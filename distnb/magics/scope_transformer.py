"""The transformer of `with strategy.scope():` in the notebook's own code, whose block runs on the replicas.

The AST transformer rewrites every `with` of a cell that calls some `.scope()`, or names an object that may be a scope.
The rewritten code decides at run time whether the strategy is remote. A function may run on a replica, where IPython
does not have the dispatcher, so the scope is checked first.

    with strategy.scope() as s:      →      _scope_ = strategy.scope()
        body                                if type(_scope_).__name__ == "StrategyScope" and _scope_.is_remote:
                                                get_ipython()._distnb_scope(_scope_, 1, 2, …)
                                                if "model" in get_ipython()._distnb_scope.bound:
                                                    model = get_ipython()._distnb_scope.bound["model"]
                                            else:
                                                with _scope_ as s:
                                                    body

In a function, the block receives the locals that it reads, and the locals that it assigns are bound after it. At the
top level of a cell, and in its `if`, `for` and `try` statements, names are the notebook's, so nothing is bound there.
"""

from __future__ import annotations

import ast
import linecache
import symtable
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from distnb.errors import ContextError
from distnb.magics.tracebacks import presented
from distnb.notebook.handles.handle import HANDLES
from distnb.objects.code.definitions import content_of
from distnb.objects.placeholder import LOCAL_PREFIX
from distnb.options import StrategySpec
from distnb.wire.messages import UsersFunction

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["RunInScope", "ScopeDispatch", "ScopeTransformer"]

RunInScope = Callable[[str, StrategySpec, str, UsersFunction | None], None]
"""A function that runs a text in a strategy's scope on the replicas: (source, spec, filename, enclosing function)."""

_DISPATCH = "get_ipython()._distnb_scope"
_IS_REMOTE = "type(_scope_).__name__ == 'StrategyScope' and _scope_.is_remote"
_MADE, _BLOCK = "_made_", "_block_"
"""The prefix of the locals that a block assigns, and the name of the block's function on the replicas."""


class ScopeTransformer(ast.NodeTransformer):
    """The transformer of the code that IPython compiles: a cell, or a function that `%%time` and the like compile."""

    def __init__(self) -> None:
        self._functions: list[ast.FunctionDef | ast.AsyncFunctionDef] = []

    def visit(self, node: ast.AST) -> Any:
        """Visit statements only, since expressions contain no `with`."""
        return node if isinstance(node, ast.expr) else super().visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        """Visit the methods of a class only: names in its body are its own."""
        for each in node.body:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                self.visit(each)
        return node

    def visit_FunctionDef(self, node: Any) -> Any:
        """Visit a function, in which the block's names are its locals."""
        self._functions.append(node)
        self.generic_visit(node)
        self._functions.pop()
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_With(self, node: ast.With) -> Any:
        """Rewrite a `with` statement that may enter a scope."""
        certain = (item for item in node.items if _calls_scope(item.context_expr))
        scope = next(certain, None) or next((item for item in node.items if _may_be_scope(item.context_expr)), None)
        if scope is None:
            return self.generic_visit(node)
        function = self._functions[-1] if self._functions else None
        stores: list[str] = []
        try:
            leaves = _leaving(node)
            if function is not None and not leaves:
                leaves, stores = _assigned(node, function)
        except SyntaxError:
            return node  # the compilation of the cell reports the error
        # The unparsed text is for statements whose lines cannot be found.
        what = f"{node.lineno}, {node.end_lineno}, {ast.unparse(node)!r}, {leaves!r}"
        if function is not None:
            names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            what += f", {sorted(names)}, {stores}"
        lines = ["_scope_ = None", f"if {_IS_REMOTE}:", f"    {_DISPATCH}(_scope_, {what})"]
        for name in stores:
            lines += [f"    if {name!r} in {_DISPATCH}.bound:", f"        {name} = {_DISPATCH}.bound[{name!r}]"]
        assignment, branch = ast.parse("\n".join(lines)).body
        assert isinstance(assignment, ast.Assign)
        assert isinstance(branch, ast.If)
        assignment.value, scope.context_expr = scope.context_expr, ast.Name("_scope_", ast.Load())
        for part in (assignment, branch, scope.context_expr):
            for each in ast.walk(part):
                if isinstance(each, ast.stmt | ast.expr):
                    ast.copy_location(each, node)
        self.generic_visit(node)
        branch.orelse = [node]
        return [assignment, branch]


def _leaving(node: ast.With) -> str:
    """Return the keyword of a statement in a block that belongs to the code around the block; "" if there is none.

    A block with such a statement cannot be sent.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # the compilation of the cell warns
            compile(ast.Module([node], []), "", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except SyntaxError as error:
        for word in ("nonlocal", "return", "yield", "break", "continue"):
            if word in error.msg:
                return word
        raise
    return ""


def _assigned(node: ast.With, function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, list[str]]:
    """Return the names that a block in a function assigns, after the keyword of a forbidden use of a name, or ""."""
    declared = {name for each in ast.walk(function) if isinstance(each, ast.Global) for name in each.names}
    deleted = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Del)}
    lines = [*(f"global {name}" for name in declared), ast.unparse(node)]
    text = "def block():\n" + textwrap.indent("\n".join(lines), "    ")
    parts = symtable.symtable(text, "", "exec").get_children()  # since Python 3.14, there is one for annotations, too
    symbols = next(each for each in parts if each.get_name() == "block").get_symbols()
    own = sorted(symbol.get_name() for symbol in symbols if symbol.is_local())
    if any(symbol.is_declared_global() and (symbol.is_assigned() or symbol.is_imported()) for symbol in symbols):
        return "global", own
    return "" if deleted.isdisjoint(own) else "del", own


def _calls_scope(expression: ast.expr) -> bool:
    return (
        isinstance(expression, ast.Call)
        and isinstance(expression.func, ast.Attribute)
        and expression.func.attr == "scope"
        and not expression.args
        and not expression.keywords
    )


def _may_be_scope(expression: ast.expr) -> bool:
    """Return whether an expression may give a scope, and can be evaluated before the other items of its `with`."""
    match expression:
        case ast.Name() | ast.Attribute():
            return True
        case ast.IfExp(body=body, orelse=orelse):
            return any(_calls_scope(each) or _may_be_scope(each) for each in (body, orelse))
        case ast.NamedExpr(value=value):
            return _calls_scope(value) or _may_be_scope(value)
    return False


class ScopeDispatch:
    """The dispatcher of blocks to the replicas. `bound` has the names that the block of a function assigned."""

    def __init__(self, run: RunInScope) -> None:
        self._run = run
        self.bound: dict[str, Any] = {}

    def install(self, shell: InteractiveShell) -> None:
        """Make the dispatcher reachable from cells."""
        shell._distnb_scope = self  # type: ignore[attr-defined]

    def __call__(
        self,
        scope: Any,
        first: int,
        last: int,
        unparsed: str,
        leaves: str,
        names: Sequence[str] = (),
        stores: Sequence[str] = (),
    ) -> None:
        """Run a `with` statement on the replicas.

        Args:
            scope: The value of the context expression, a remote scope of a strategy.
            first, last: The first and last line of the statement.
            unparsed: The statement as text, for lines that cannot be found.
            leaves: The keyword of a statement in the block that belongs to the code around the block; "" if none does.
            names: The names in the statement, if it is in a function. The function's locals among them are sent along.
            stores: The names among these that the statement assigns.
        """
        if leaves:
            raise ContextError(
                f"The block of `with strategy.scope():` runs on the replicas, but contains a `{leaves}` that belongs "
                "to the code around it, which runs in the notebook. Put the whole code in a %%distribute cell, or the "
                "statement after the block."
            )
        frame = sys._getframe(1)
        user_ns, filename = frame.f_globals, frame.f_code.co_filename
        text, indent = _text_of(filename, first, last, unparsed)
        self.bound.clear()
        if not names:
            above = "\n" * (first - 2) + "if True:\n" if indent else "\n" * (first - 1)
            self._send(above + text, scope, filename, None)
            return
        if not indent:
            text, indent = textwrap.indent(text, "    "), "    "
        here = frame.f_locals if frame.f_locals is not user_ns else {}
        for name in names:
            _refuse_captured(here.get(name), frame.f_code, stores)
        given = {LOCAL_PREFIX + name: here[name] for name in names if name in here}
        head = ", ".join(f"{name}={LOCAL_PREFIX}{name}" for name in names if name in here)
        tail = [f"{indent}global {', '.join(_MADE + name for name in stores)}"] if stores else []
        for name in stores:
            tail += [f"{indent}try:", f"{indent}    {_MADE}{name} = {name}"]
            tail += [f"{indent}except NameError:", f"{indent}    pass"]
        body = "\n".join([text, *tail, f"{_BLOCK}()", ""])
        user_ns.update(given)
        try:
            source = "\n" * (first - 2) + f"def {_BLOCK}({head}):\n{body}"
            code = frame.f_code
            self._send(source, scope, filename, UsersFunction(code.co_qualname, code.co_firstlineno))
            for name, value in given.items():
                _refuse_replaced(name.removeprefix(LOCAL_PREFIX), value, user_ns.get(name))
        finally:
            for name in (*given, _BLOCK):
                user_ns.pop(name, None)
            made = {name: user_ns.pop(_MADE + name) for name in stores if _MADE + name in user_ns}
        self.bound.update(made)

    def _send(self, source: str, scope: Any, filename: str, function: UsersFunction | None) -> None:
        with presented():
            self._run(source, scope.strategy.spec, filename, function)


def _refuse_replaced(name: str, before: Any, after: Any) -> None:
    """Raise ContextError for an object of the function's that the block has changed and that is now on the replicas."""
    if after is not before and isinstance(after, HANDLES) and not isinstance(before, HANDLES):
        kind = type(before).__name__
        raise ContextError(
            f"The block of `with strategy.scope():` runs on the replicas. It has changed {name!r}, a {kind} that was "
            "made in the notebook, and what it has put there stays on the replicas, where the notebook's object cannot "
            f"hold it. Make the whole {kind} in the scope (`with strategy.scope(): model = {kind}(...)`, without a "
            "scope in its methods), or put the code in a %%distribute cell."
        )


def _refuse_captured(function: Any, around: CodeType, stores: Sequence[str]) -> None:
    """Raise ContextError for a function outside the block that uses a name which the block assigns.

    On the replicas the name belongs only to the block, and the function would find the name's earlier value.
    """
    waiting, seen = [function], set[int]()
    while waiting:
        each = waiting.pop()
        if not isinstance(each, FunctionType) or id(each) in seen:
            continue
        seen.add(id(each))
        if any(each.__code__ is constant for constant in around.co_consts):
            captured = next((name for name in each.__code__.co_freevars if name in stores), None)
            if captured is not None:
                raise ContextError(
                    f"The block of `with strategy.scope():` runs on the replicas, assigns {captured!r}, and uses "
                    f"{each.__name__!r}, which was defined before the block and refers to {captured!r}. It would not "
                    f"find the block's value there. Define {each.__name__!r} within the block, pass it "
                    f"{captured!r} as an argument, or put the whole code in a %%distribute cell."
                )
        waiting += [content_of(cell) for cell in each.__closure__ or ()]


def _text_of(filename: str, first: int, last: int, unparsed: str) -> tuple[str, str]:
    """Return a statement's text in its file with its indentation, or `unparsed` if those lines differ from it."""
    text = "".join(linecache.getlines(filename)[first - 1 : last])
    indent = text[: len(text) - len(text.lstrip(" \t"))]
    try:
        found = ast.parse("if True:\n" + text if indent else text)
    except SyntaxError:
        return unparsed, ""
    same = ast.unparse(found) == ("if True:\n" + textwrap.indent(unparsed, "    ") if indent else unparsed)
    return (text, indent) if same else (unparsed, "")
