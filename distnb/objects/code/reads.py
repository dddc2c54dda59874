"""The names that a cell reads before it has certainly assigned them.

The result may contain too many names, but never too few: a missing name would not exist on the engines, and a
superfluous one only costs a digest. Python's own compiler finds the names that each statement reads. The bodies of the
cell's functions and classes count from the first read of their names on.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import re
import types
from collections.abc import Iterable
from dataclasses import dataclass, field

from distnb.objects.code.definitions import DYNAMIC, DYNAMIC_ATTRIBUTES, names_of_code, own_names

__all__ = ["Reads", "names_read"]

_SWALLOWING = ("suppress", "raises", "assertRaises")
_DYNAMIC_MAGICS = frozenset(
    {"debug", "edit", "load", "macro", "recall", "rerun", "reset", "reset_selective", "run", "store"}
    | {"who", "who_ls", "whos"}
)
_OF_ANNOTATIONS = {"__conditional_annotations__"}  # the compiler's own name, since Python 3.14
_WORD = re.compile(r"[^\W\d]\w*")
_INTERPOLATED = re.compile(r"\{[^{}]+\}|\$\w+")

Names = frozenset[str]


@dataclass
class Reads:
    """The names that a cell reads from the namespace.

    Attributes:
        names: Names, including builtins, that it reads or deletes before it has certainly assigned them.
        assigned: Names that statements at its top level assign, if they run.
        attributes: Names of attributes in it. They show which submodules it uses.
        imports: The modules that it imports (see `CodeNames`).
        dynamic: True if it may read any name (eval, exec, globals(), %run…).
    """

    names: set[str] = field(default_factory=set)
    assigned: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    imports: set[str] = field(default_factory=set)
    dynamic: bool = False


@functools.lru_cache(maxsize=256)
def names_read(source: str) -> Reads:
    """Analyse a cell, including IPython's syntax. An invalid cell reads nothing: the engines raise its SyntaxError."""
    from IPython.core.inputtransformer2 import TransformerManager

    try:
        tree = ast.parse(TransformerManager().transform_cell(source))
    except (SyntaxError, ValueError):
        return Reads()
    flow = _Flow()
    flow.block(tree.body, frozenset())
    return flow.found


class _Flow:
    """A visitor of statements in the order in which they run. `sure` are the names that are certainly assigned."""

    def __init__(self) -> None:
        self.found = Reads()
        self._bodies: dict[str, set[str]] = {}  # the names that the cell's functions and classes read when used

    def block(self, statements: Iterable[ast.stmt], sure: Names) -> Names:
        """Visit statements in order, and return the names that are certainly assigned after them."""
        for statement in statements:
            sure = self._statement(statement, sure)
        return sure

    def _statement(self, node: ast.stmt, sure: Names) -> Names:
        match node:
            case ast.If():
                self._code(node.test, sure)
                return self.block(node.body, sure) & self.block(node.orelse, sure)
            case ast.While():
                self._code(node.test, sure)
                return sure & self.block(node.body, sure) & self.block(node.orelse, sure)
            case ast.For() | ast.AsyncFor():
                self._code(node.iter, sure)
                inside = self._assign(node.target, sure)
                return sure & self.block(node.body, inside) & self.block(node.orelse, sure)
            case ast.With() | ast.AsyncWith():
                inside = sure
                for item in node.items:
                    self._code(item.context_expr, inside)
                    if item.optional_vars is not None:
                        inside = self._assign(item.optional_vars, inside)
                after = self.block(node.body, inside)
                swallows = any(word in ast.dump(item.context_expr) for item in node.items for word in _SWALLOWING)
                return after & sure if swallows else after
            case ast.Try() | ast.TryStar():
                return self._try(node, sure)
            case _:
                return self._code(node, sure)

    def _try(self, node: ast.Try | ast.TryStar, sure: Names) -> Names:
        after = self.block(node.body, sure)
        failed = sure & after  # any statement of the body may raise
        after = self.block(node.orelse, after)
        for handler in node.handlers:
            if handler.type is not None:
                self._code(handler.type, failed)
            bound = {handler.name} if handler.name else set()
            self.found.names |= bound  # Python deletes it at the handler's end
            after &= self.block(handler.body, failed | bound) - bound
        finally_ = self.block(node.finalbody, failed)
        return (after | finally_) - (failed - finally_)

    def _assign(self, target: ast.expr, sure: Names) -> Names:
        """Visit the target of a loop or a `with`, and return the names that are certainly assigned after it."""
        assign = ast.Assign([target], ast.Constant(None))
        return self._code(ast.fix_missing_locations(ast.copy_location(assign, target)), sure)

    def _code(self, node: ast.stmt | ast.expr, sure: Names) -> Names:
        """Visit a statement or an expression as a whole, and return the names that are certainly assigned after it."""
        tree = ast.Expression(node) if isinstance(node, ast.expr) else ast.Module([node], [])
        mode = "eval" if isinstance(node, ast.expr) else "exec"
        try:
            code = compile(tree, "<cell>", mode, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        except SyntaxError:  # such as a `break` without its loop
            self._read({part.id for part in ast.walk(node) if isinstance(part, ast.Name)}, sure)
            return sure
        now, later = _now_and_later(code)
        if "get_ipython" in now:
            now |= self._of_magics(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            # `__init_subclass__`, a metaclass or a decorator may call the functions at once.
            if node.decorator_list or (isinstance(node, ast.ClassDef) and (node.bases or node.keywords)):
                now |= later
            self._bodies[node.name] = later
        self._read(now, sure)
        self.found.attributes |= names_of_code(code).attributes
        self.found.imports |= names_of_code(code).imports
        self.found.dynamic = self.found.dynamic or not DYNAMIC_ATTRIBUTES.isdisjoint(self.found.attributes)
        deleted = {each.argval for each in dis.get_instructions(code) if each.opname == "DELETE_NAME"}
        self.found.names |= deleted  # even if the cell has just assigned it: the notebook must delete it, too
        perhaps = {part.target.id for part in ast.walk(node) if isinstance(part, ast.NamedExpr)}
        stored = {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_NAME"}
        self.found.assigned |= stored
        return (sure if isinstance(node, ast.Match) else sure | (stored - perhaps)) - deleted

    def _read(self, names: set[str], sure: Names) -> None:
        """Add the names that are read, and the names that functions of the cell among them may read when called."""
        waiting, seen = list(names), set(names)
        while waiting:
            more = self._bodies.get(waiting.pop(), set()) - seen
            waiting += more
            seen |= more
        self.found.names |= seen - sure
        self.found.dynamic = self.found.dynamic or bool(seen & DYNAMIC)

    def _of_magics(self, node: ast.AST) -> set[str]:
        """Return the words in calls of the shell's methods, into which IPython transforms its own syntax."""
        words: set[str] = set()
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                texts = [each.value for each in call.args if isinstance(each, ast.Constant)]
                text = " ".join(each for each in texts if isinstance(each, str))
                if call.func.attr in ("system", "getoutput"):
                    text = " ".join(_INTERPOLATED.findall(text))
                elif call.func.attr.startswith("run_") and texts[:1] and texts[0] in _DYNAMIC_MAGICS:
                    self.found.dynamic = True
                words.update(_WORD.findall(text))
        return words


def _now_and_later(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Return the global names that code reads when it runs, and those that functions it defines read later."""
    now, later = set(own_names(code)), set[str]()
    for part in code.co_consts:
        if not isinstance(part, types.CodeType):
            continue
        if not part.co_flags & inspect.CO_NEWLOCALS:  # a class's body
            names = _now_and_later(part)
            now |= names[0]
            later |= names[1]
        else:  # comprehensions run at once; lambdas and (since Python 3.14) annotations may do so
            perhaps = part.co_name.startswith("<") or part.co_name == "__annotate__"
            (now if perhaps else later).update(names_of_code(part).names)
    return now - _OF_ANNOTATIONS, later - _OF_ANNOTATIONS
