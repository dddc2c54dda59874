"""The flow of control through a cell: which names are surely assigned where one is read."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

__all__ = ["Assigned", "Body", "Flow", "Found"]

_DYNAMIC_CALLS = frozenset({"dir", "eval", "exec", "globals", "locals", "vars"})
_SWALLOWING = ("suppress", "raises", "assertRaises")

Assigned = frozenset[str] | None
"""The names that are surely assigned at some point of the cell; None where the point is never reached."""


@dataclass
class Found:
    """What a cell asks of the namespace: see `reads.Reads`."""

    names: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    dynamic: bool = False


@dataclass
class Body:
    """What a function or class defined in the cell reads when it is used."""

    names: frozenset[str]
    dynamic: bool


@dataclass
class _Loop:
    breaks: list[Assigned] = field(default_factory=list)


def _merge(*states: Assigned) -> Assigned:
    reached = [state for state in states if state is not None]
    return frozenset.intersection(*reached) if reached else None


class Flow(ast.NodeVisitor):
    """Walks statements in the order in which they run. Code in them that has a scope of its own is a subclass's.

    Attributes:
        found: What the cell reads.
        assigned: What is surely assigned here.
        bodies: The functions and classes of the cell, by name.
        hidden: The targets of the comprehensions and lambdas around.
    """

    def __init__(self, found: Found | None = None) -> None:
        self.found = found if found is not None else Found()
        self.assigned: Assigned = frozenset()
        self.bodies: dict[str, Body] = {}
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

    def use(self, body: Body) -> None:
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
            self.found.names.add(node.id)  # also one that was just assigned: it has to go from the notebook, too
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
                self.found.names.add(handler.name)  # at the handler's end it is deleted
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

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self.visit(node.target)
