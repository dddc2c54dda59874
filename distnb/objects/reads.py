"""Which names a cell reads before it has surely assigned them.

The answer may name too many, never too few: a name that is not delivered is not there on the engines. Functions that
a cell defines are looked into where their names are first used: what they read counts from there.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass

from distnb.objects import magics_read
from distnb.objects.code import names_of_code
from distnb.objects.flow import Body, Flow

__all__ = ["Reads", "names_read"]


@dataclass(frozen=True)
class Reads:
    """What a cell asks of the namespace.

    Attributes:
        names: Names it reads (or deletes) before it has surely assigned them; builtins among them.
        attributes: Names of attributes in it, to tell submodules.
        dynamic: It may read any name (eval, exec, globals(), %run…).
        assigned: Names that it has surely assigned at its end.
    """

    names: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()
    dynamic: bool = False
    assigned: frozenset[str] = frozenset()


@functools.lru_cache(maxsize=256)
def names_read(source: str) -> Reads:
    """Analyse a cell, IPython syntax included. A cell that is no Python reads nothing: the engines will say why."""
    try:
        tree = ast.parse(magics_read.as_python(source))
    except (SyntaxError, ValueError):
        return Reads()
    flow = _Reading()
    flow.block(tree.body)
    found = flow.found
    return Reads(frozenset(found.names), frozenset(found.attributes), found.dynamic, frozenset(flow.assigned or ()))


class _Reading(Flow):
    """Looks into code of the cell that runs in a scope of its own, or later."""

    # -- comprehensions ----------------------------------------------------------------------------------------------

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
        inner = _Reading(self.found)
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
        self.bodies[node.name] = Body(frozenset(names), dynamic)
        self.bind(node.name)
        # `__init_subclass__`, a metaclass or a decorator may use it at once.
        if node.decorator_list or node.bases or node.keywords:
            self.use(self.bodies[node.name])

    def _body_of(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Body:
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
        return Body(used.names, used.dynamic)

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
