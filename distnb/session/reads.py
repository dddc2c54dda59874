"""Which names a cell reads before it has surely assigned them.

The answer may name too many, never too few: a name that is not delivered is not there on the engines. Functions that
a cell defines are looked into where their names are first used: what they read counts from there.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass, field

from distnb.session import magics_read
from distnb.wire.code import names_of_code

__all__ = ["Reads", "names_read"]

_DYNAMIC_CALLS = frozenset({"eval", "exec", "globals", "locals", "vars"})
_SWALLOWING = ("suppress", "raises", "assertRaises")

Assigned = frozenset[str] | None
"""The names that are surely assigned at some point of the cell; None where the point is never reached."""


@dataclass(frozen=True)
class Reads:
    """What a cell asks of the namespace.

    Attributes:
        names: Names it reads (or deletes) before it has surely assigned them; builtins among them.
        attributes: Names of attributes in it, to tell submodules.
        dynamic: It may read any name (eval, exec, globals(), %run…).
    """

    names: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()
    dynamic: bool = False


@functools.lru_cache(maxsize=256)
def names_read(source: str) -> Reads:
    """Analyse a cell, IPython syntax included. A cell that is no Python reads nothing: the engines will say why."""
    try:
        tree = ast.parse(magics_read.as_python(source))
    except (SyntaxError, ValueError):
        return Reads()
    flow = _Flow()
    flow.block(tree.body)
    return Reads(frozenset(flow.found.names), frozenset(flow.found.attributes), flow.found.dynamic)


@dataclass
class _Found:
    names: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    dynamic: bool = False


@dataclass
class _Body:
    """What a function or class defined in the cell reads when it is used."""

    names: frozenset[str]
    dynamic: bool


@dataclass
class _Loop:
    breaks: list[Assigned] = field(default_factory=list)


def _merge(*states: Assigned) -> Assigned:
    reached = [state for state in states if state is not None]
    return frozenset.intersection(*reached) if reached else None


class _Flow(ast.NodeVisitor):
    """Walks statements in the order in which they run."""

    def __init__(self, found: _Found | None = None) -> None:
        self.found = found if found is not None else _Found()
        self.assigned: Assigned = frozenset()
        self.bodies: dict[str, _Body] = {}
        self.loops: list[_Loop] = []
        self.deleted: set[str] = set()
        self.hidden: list[set[str]] = []  # targets of the comprehensions around

    # -- names -----------------------------------------------------------------------------------------------------

    def read(self, name: str) -> None:
        """A name is read here."""
        if any(name in targets for targets in self.hidden):
            return
        if name in _DYNAMIC_CALLS:
            self.found.dynamic = True
        if self.assigned is not None and name not in self.assigned:
            self.found.names.add(name)
        body = self.bodies.get(name)
        if body is not None:
            self.use(body)

    def use(self, body: _Body) -> None:
        """A function of the cell may be called from here on."""
        pending, seen = [body], {id(body)}
        while pending:
            current = pending.pop()
            self.found.dynamic = self.found.dynamic or current.dynamic
            for name in current.names:
                if self.assigned is not None and name not in self.assigned:
                    self.found.names.add(name)
                inner = self.bodies.get(name)
                if inner is not None and id(inner) not in seen:
                    seen.add(id(inner))
                    pending.append(inner)

    def bind(self, name: str) -> None:
        """A name is surely assigned here."""
        if self.assigned is not None:
            self.assigned |= {name}

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.read(node.id)
        elif isinstance(node.ctx, ast.Store):
            self.bodies.pop(node.id, None)
            self.bind(node.id)
        else:
            self.read(node.id)
            self.deleted.add(node.id)
            if self.assigned is not None:
                self.assigned -= {node.id}

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.found.attributes.add(node.attr)
        self.generic_visit(node)

    # -- statements ------------------------------------------------------------------------------------------------

    def block(self, statements: list[ast.stmt]) -> None:
        """Statements, one after the other."""
        for statement in statements:
            self.visit(statement)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.read(node.target.id)
        self.visit(node.value)
        self.visit(node.target)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit(node.annotation)
        if node.value is not None:
            self.visit(node.value)
            self.visit(node.target)
        elif not isinstance(node.target, ast.Name):
            self.visit(node.target)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.bind(alias.asname or alias.name.split(".")[0])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if alias.name != "*":
                self.bind(alias.asname or alias.name)

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        before = self.assigned
        self.block(node.body)
        after_body, self.assigned = self.assigned, before
        self.block(node.orelse)
        self.assigned = _merge(after_body, self.assigned)

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        endless = isinstance(node.test, ast.Constant) and bool(node.test.value)
        self._loop(node, None if endless else self.assigned)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        without = self.assigned
        self.visit(node.target)
        self._loop(node, without)

    def visit_AsyncFor(self, node: ast.AsyncFor) -> None:
        self.visit_For(node)

    def _loop(self, node: ast.While | ast.For | ast.AsyncFor, at_end: Assigned) -> None:
        self.loops.append(_Loop())
        self.block(node.body)
        loop = self.loops.pop()
        self.assigned = at_end if at_end is None or not self.deleted else at_end - self.deleted
        self.block(node.orelse)
        self.assigned = _merge(self.assigned, *loop.breaks)

    def visit_Break(self, node: ast.Break) -> None:
        if self.loops:
            self.loops[-1].breaks.append(self.assigned)
        self.assigned = None

    def visit_Continue(self, node: ast.Continue) -> None:
        self.assigned = None

    def visit_Raise(self, node: ast.Raise) -> None:
        self.generic_visit(node)
        self.assigned = None

    def visit_Return(self, node: ast.Return) -> None:
        self.generic_visit(node)
        self.assigned = None

    def visit_Try(self, node: ast.Try) -> None:
        self._try(node)

    def visit_TryStar(self, node: ast.TryStar) -> None:
        self._try(node)

    def _try(self, node: ast.Try | ast.TryStar) -> None:
        before, outer_deleted = self.assigned, self.deleted
        self.deleted = set()
        self.block(node.body)
        self.block(node.orelse)
        ends = [self.assigned]
        anywhere = before if before is None else before - self.deleted
        for handler in node.handlers:
            self.assigned = anywhere
            if handler.type is not None:
                self.visit(handler.type)
            if handler.name:
                self.bind(handler.name)
            self.block(handler.body)
            if handler.name and self.assigned is not None:
                self.assigned -= {handler.name}
            ends.append(self.assigned)
        after = _merge(*ends)
        if node.finalbody:
            self.assigned = anywhere if anywhere is not None else frozenset()
            self.block(node.finalbody)
            sure = (self.assigned or frozenset()) - (anywhere or frozenset())
            ended = self.assigned is None
            after = None if ended or after is None else after | sure
        self.deleted |= outer_deleted
        self.assigned = after

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        before = self.assigned
        for item in node.items:
            self.visit(item)
        self.block(node.body)
        if any(word in ast.dump(item.context_expr) for item in node.items for word in _SWALLOWING):
            self.assigned = _merge(self.assigned, before)

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        self.visit_With(node)

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        before, ends = self.assigned, []
        exhaustive = False
        for case in node.cases:
            self.assigned = before
            for part in ast.walk(case.pattern):
                if isinstance(part, ast.MatchAs | ast.MatchStar) and part.name:
                    self.bind(part.name)
                elif isinstance(part, ast.MatchMapping) and part.rest:
                    self.bind(part.rest)
            self.visit(case.pattern)
            if case.guard is not None:
                self.visit(case.guard)
            self.block(case.body)
            ends.append(self.assigned)
            exhaustive = exhaustive or (
                isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None and case.guard is None
            )
        self.assigned = _merge(*ends) if exhaustive else _merge(before, *ends)

    # -- expressions that run partly, or never -----------------------------------------------------------------------

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.visit(node.values[0])
        sure = self.assigned
        for value in node.values[1:]:
            self.visit(value)
        self.assigned = sure

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        sure = self.assigned
        self.visit(node.body)
        self.assigned = sure
        self.visit(node.orelse)
        self.assigned = sure

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        first = node.generators[0]
        self.visit(first.iter)
        sure = self.assigned
        self.hidden.append(
            {
                part.id
                for generator in node.generators
                for part in ast.walk(generator.target)
                if isinstance(part, ast.Name)
            }
        )
        for generator in node.generators:
            if generator is not first:
                self.visit(generator.iter)
            for condition in generator.ifs:
                self.visit(condition)
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.visit(part)
        self.hidden.pop()
        self.assigned = sure

    def visit_ListComp(self, node: ast.ListComp) -> None:
        self._comprehension(node)

    def visit_SetComp(self, node: ast.SetComp) -> None:
        self._comprehension(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> None:
        self._comprehension(node)

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._comprehension(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self.visit(node.target)

    # -- code that runs later ----------------------------------------------------------------------------------------

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for part in (
            *node.decorator_list,
            *node.args.defaults,
            *filter(None, node.args.kw_defaults),
            *_annotations(node),
        ):
            self.visit(part)
        body = self._body_of(node)
        self.bind(node.name)
        self.bodies[node.name] = body
        if node.decorator_list:
            self.use(body)  # a decorator may call it, or keep it elsewhere

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        targets = {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
        sure = self.assigned
        self.hidden.append(targets)
        self.visit(node.body)
        self.hidden.pop()
        self.assigned = sure

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in (*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)):
            self.visit(part)
        outside = self.assigned
        inner = _Flow(self.found)
        inner.assigned, inner.bodies, inner.hidden = outside, dict(self.bodies), self.hidden
        for statement in node.body:
            inner.visit(statement)
        names: set[str] = set()
        dynamic = False
        for member in node.body:
            for method in ast.walk(member):
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                    body = self._body_of(method)
                    names |= body.names
                    dynamic = dynamic or body.dynamic
        # What the class body assigned belongs to the class, not to the cell.
        self.bodies[node.name] = _Body(frozenset(names), dynamic)
        self.bind(node.name)
        # `__init_subclass__`, a metaclass or a decorator may use it at once.
        if node.decorator_list or node.bases or node.keywords:
            self.use(self.bodies[node.name])

    def _body_of(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> _Body:
        """What a function's code asks of its globals when it runs, told by Python's own compiler."""
        if isinstance(node, ast.Lambda):
            code = compile(ast.Expression(node), "<cell>", "eval", dont_inherit=True)
        else:
            bare = type(node)(**{name: getattr(node, name) for name in node._fields})
            bare.decorator_list = []
            code = compile(ast.Module([ast.copy_location(bare, node)], []), "<cell>", "exec", dont_inherit=True)
        used = names_of_code(code)
        for name in used.attributes:
            self.found.attributes.add(name)
        return _Body(used.names, used.dynamic)

    # -- IPython's own calls -----------------------------------------------------------------------------------------

    def visit_Call(self, node: ast.Call) -> None:
        magic = magics_read.magic_of(node)
        if magic is None:
            self.generic_visit(node)
            return
        self.found.dynamic = self.found.dynamic or magic.dynamic
        for expression in magic.expressions:
            self._part(expression, "eval")
        if magic.body is not None:
            self._part(magic.body, "exec")
        for name in magic.assigns:
            self.bind(name)

    def _part(self, text: str, mode: str) -> None:
        try:
            tree = ast.parse(magics_read.as_python(text) if mode == "exec" else text.strip(), mode=mode)
        except (SyntaxError, ValueError):
            return
        if isinstance(tree, ast.Module):
            self.block(tree.body)
        elif isinstance(tree, ast.Expression):
            self.visit(tree.body)


def _annotations(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.expr]:
    arguments = [argument for argument in ast.walk(node.args) if isinstance(argument, ast.arg)]
    found = [argument.annotation for argument in arguments if argument.annotation is not None]
    return found if node.returns is None else [*found, node.returns]
