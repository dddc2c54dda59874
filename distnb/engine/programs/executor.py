"""The executor, which runs a cell's text in the engine's IPython namespace as IPython itself would.

IPython's own `run_cell` prints the traceback and continues. Here an error must reach the notebook, the last
expression's value must be shown there, and `await` must work although an event loop is running.
"""

from __future__ import annotations

import ast
import inspect
import types
from types import CodeType
from typing import TYPE_CHECKING, Any

from distnb.objects.placeholder import Placeholder
from distnb.runtime import contexts
from distnb.wire.messages import Display, UsersFunction

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from distnb.engine.control import Control
    from distnb.engine.programs.users_loop import UsersLoop

__all__ = ["Executor"]


class Executor:
    """The runner of source text in a shell's user namespace. `control` shows the value of the last expression."""

    def __init__(self, engine: int, shell: InteractiveShell, control: Control, users_loop: UsersLoop) -> None:
        self._engine = engine
        self._shell = shell
        self._control = control
        self._users_loop = users_loop

    def run(self, source: str, filename: str, function: UsersFunction | None = None) -> None:
        """Run a cell to its end, and raise whatever it raises.

        With a `function`, the source is a block of that user function. The source defines a function that contains the
        block, and this method calls it. Tracebacks show the block's lines, in the user's function.

        Raises:
            SystemExit: The cell exits with a status that means failure. Any other `exit()` only ends the cell.
        """
        # Empty lines at the top keep the line numbers equal to those of the notebook's cell, but IPython strips them.
        padding = "\n" * (len(source) - len(source.lstrip("\n")))
        text = padding + self._shell.transform_cell(source)
        tree = self._shell.transform_ast(ast.parse(text, filename))
        try:
            if function is not None:
                self._block(tree, filename, function)()
            else:
                with self._users_loop.noting_tasks():
                    self._statements(tree, filename, silent=_is_silenced(text))
            contexts.enter_lasting_scope(None)
        except SystemExit as ended:
            contexts.enter_lasting_scope(None, None if ended.code in (None, 0) else ended)
            if ended.code not in (None, 0):
                raise
        except BaseException as error:
            contexts.enter_lasting_scope(None, error)
            raise

    def _statements(self, tree: ast.Module, filename: str, *, silent: bool) -> None:
        """Run a cell's statements, and show the value of the last one."""
        last: Any = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) and not silent else None
        if tree.body:
            self._execute(self._compile(tree, filename, "exec"))
        if last is not None:
            self._show(self._execute(self._compile(ast.Expression(last.value), filename, "eval")))

    def _block(self, tree: ast.Module, filename: str, function: UsersFunction) -> types.FunctionType:
        """Create the function that contains the block. Added code gets the line of the user's statement."""
        definition: Any = tree.body[0]
        statement, *added = definition.body
        for each in (definition, *added):
            for node in ast.walk(each) if each is not definition else (definition, *ast.walk(definition.args)):
                if isinstance(node, ast.stmt | ast.expr | ast.arg | ast.excepthandler):
                    ast.copy_location(node, statement)
        definition.lineno = function.line  # where inspect and tracebacks find its text
        self._execute(self._compile(ast.Module([definition], []), filename, "exec"))
        block: types.FunctionType = self._shell.user_ns.pop(definition.name)
        code = _requalified(block.__code__, definition.name, function.name)
        block.__code__ = code.replace(co_name=function.name.rpartition(".")[2])
        return block

    def _compile(self, tree: ast.Module | ast.Expression, filename: str, mode: str) -> CodeType:
        # The shell's flags hold the `from __future__` imports of earlier cells.
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | self._shell.compile.flags
        code: CodeType = compile(ast.fix_missing_locations(tree), filename, mode, flags=flags, dont_inherit=True)
        return code

    def _execute(self, code: CodeType) -> Any:
        namespace = self._shell.user_ns
        result = eval(code, namespace)
        if code.co_flags & inspect.CO_COROUTINE:
            return self._users_loop.run(result)
        return result

    def _show(self, value: Any) -> None:
        if value is None:
            return
        if type(value) is Placeholder:
            value.refuse()
        self._shell.user_ns["_"] = value  # as in IPython; the notebook receives it like any other name
        running = self._control.running
        data, metadata = self._shell.display_formatter.format(value)  # type: ignore[union-attr]
        if running is not None and data:
            program, replica = running
            self._control.emit(
                Display(engine=self._engine, program=program, replica=replica, data=data, metadata=metadata)
            )


def _requalified(code: CodeType, before: str, after: str) -> CodeType:
    """Replace the beginning of the qualified name of a code object, and of the functions and classes in it."""
    constants = [_requalified(each, before, after) if isinstance(each, CodeType) else each for each in code.co_consts]
    return code.replace(co_consts=tuple(constants), co_qualname=after + code.co_qualname.removeprefix(before))


def _is_silenced(text: str) -> bool:
    """Return whether the cell ends in a semicolon, which asks IPython not to show the last value."""
    return text.rstrip().endswith(";")
