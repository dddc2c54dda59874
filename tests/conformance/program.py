"""Programs of the suite: functions whose bodies are the texts that every strategy runs."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.conformance import programs

PAGES = Path(__file__).parents[2] / "docs"
SYNCHRONOUS = ("default", "one_device", "mirrored", "multi_worker", "central_storage", "sharded")
EVERYWHERE = (*SYNCHRONOUS, "parameter_server")
MODES = ("cell", "ordinary", "script")


@dataclass(frozen=True)
class Refusal:
    """A named error instead of a result.

    Attributes:
        error: The class in `distnb.errors`.
        page: The page of docs that says so, such as "sharded.md".
        says: The words on that page, whatever its line breaks.
        alone: Whether one replica raises it, too.
    """

    error: str
    page: str
    says: str
    alone: bool = False

    def check_documented(self) -> None:
        """Check that the page says so."""
        page = " ".join((PAGES / self.page).read_text(encoding="utf-8").split())
        assert " ".join(self.says.split()) in page, f"docs/{self.page} does not say: {self.says}"


@dataclass(frozen=True)
class Program:
    """A text that runs as a cell, as an ordinary cell and as a script, and leaves its numbers in `result`.

    Attributes:
        name: Its module and function, and its case in brackets.
        text: The body of its function.
        module: Everything else that its module defines.
        constants: The names that differ between its cases.
        under: The strategies that it is for.
        replicas: The numbers of replicas that it is for.
        modes: The modes that it is for.
        options: Options of the strategies with several replicas: by keyword, the text of the value.
        refused: By strategy, or strategy and mode ("mirrored/cell"), the error that it raises there.
        expected: Returns the result for a number of replicas; None to run the text itself with plain torch.
        by_slices: Whether plain torch computes the replicas' slices one after another, because they differ in more
            than their rows.
        dtype: The default dtype.
        tolerance: The largest difference in a list of numbers, relative to its largest entry.
        notices: Text that the cell shows in stderr.
        samples: The number of strategies under which `make test` runs it, other ones for each program.
        has_many_cases: Whether it is one of many cases that differ in constants only.
    """

    name: str
    text: str
    module: str
    constants: Mapping[str, Any]
    under: tuple[str, ...]
    replicas: tuple[int, ...]
    modes: tuple[str, ...]
    options: Mapping[str, Any]
    refused: Mapping[str, Refusal]
    expected: Callable[..., dict[str, Any]] | None
    by_slices: bool
    dtype: str
    tolerance: float
    notices: str
    samples: int
    has_many_cases: bool

    @property
    def parts(self) -> list[str]:
        """The text between its pauses."""
        return self.text.split("pause()\n")

    def refusal(self, strategy: str, mode: str, replicas: int) -> Refusal | None:
        """Return the error that the program lists for a combination."""
        listed = self.refused.get(f"{strategy}/{mode}", self.refused.get(strategy))
        if listed is None or (replicas == 1 and not listed.alone):
            return None
        return listed


@dataclass
class _Registry:
    programs: list[Program] = field(default_factory=list)


_registry = _Registry()
_MANY = 4
_SAMPLES, _SAMPLES_OF_MANY = 3, 2


def program(
    *,
    under: tuple[str, ...] = SYNCHRONOUS,
    replicas: tuple[int, ...] = (1, 2, 3),
    modes: tuple[str, ...] = MODES,
    options: Mapping[str, Any] | None = None,
    refused: Mapping[str, Refusal] | None = None,
    cases: Mapping[str, Mapping[str, Any]] | None = None,
    expected: Callable[..., dict[str, Any]] | None = None,
    by_slices: bool = False,
    dtype: str = "float64",
    tolerance: float = 1e-9,
    notices: str = "",
    samples: int | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a program, the decorated function.

    Args:
        under: As in `Program`, like all the others but one.
        cases: The program's cases: the constants of each, by its name. `expected` is called with them as keywords.
            The refusals of a case may be among its constants, as `refused`. Each of many cases has samples only.
    """
    many = len(cases or {}) >= _MANY

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        source = inspect.getsource(inspect.getmodule(function))  # type: ignore[arg-type]
        topic = function.__module__.rpartition(".")[2]
        for case, constants in (cases or {"": {}}).items():
            given = dict(constants)
            refusals = {**(refused or {}), **given.pop("refused", {})}
            _registry.programs.append(
                Program(
                    name=f"{topic}.{function.__name__}" + (f"[{case}]" if case else ""),
                    text=_body(source, function.__name__),
                    module=_without_programs(source),
                    constants=given,
                    under=tuple(given.pop("under", under)),
                    replicas=replicas,
                    modes=modes,
                    options={**(options or {}), **given.pop("options", {})},
                    refused=refusals,
                    expected=expected,
                    by_slices=by_slices,
                    dtype=dtype,
                    tolerance=tolerance,
                    notices=notices,
                    samples=samples or (_SAMPLES_OF_MANY if many else _SAMPLES),
                    has_many_cases=many,
                )
            )
        return function

    return add


def all_programs() -> list[Program]:
    """Return the programs of every module."""
    for module in pkgutil.iter_modules(programs.__path__):
        importlib.import_module(f"{programs.__name__}.{module.name}")
    return _registry.programs


def _body(source: str, name: str) -> str:
    """Return a function's body as the text of a cell: it assigns to `result` what the function returns."""
    [function] = [node for node in _parsed(source) if isinstance(node, ast.FunctionDef) and node.name == name]
    statements = function.body[ast.get_docstring(function) is not None :]
    last = statements[-1]
    assert isinstance(last, ast.Return), f"{name} does not end with `return`"
    lines = source.splitlines()
    lines[last.lineno - 1] = lines[last.lineno - 1].replace("return ", "result = ", 1)
    begin = (
        statements[0].decorator_list[0] if getattr(statements[0], "decorator_list", None) else statements[0]
    ).lineno
    return textwrap.dedent("\n".join(lines[begin - 1 : last.end_lineno])) + "\n"


@functools.cache
def _parsed(source: str) -> list[ast.stmt]:
    return ast.parse(source).body


@functools.cache
def _without_programs(source: str) -> str:
    """Return the text of a module without its docstring, its programs and what only the tests need."""

    def belongs(node: ast.stmt) -> bool:
        if isinstance(node, ast.ImportFrom):
            return node.module != "__future__" and not (node.module or "").startswith("tests")
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            return not ast.unparse(node.decorator_list[0]).startswith("program(")
        if isinstance(node, ast.FunctionDef):
            return not node.name.startswith("_")
        if isinstance(node, ast.Assign):
            return not ast.unparse(node.targets[0]).startswith("_")
        return not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))

    return "\n".join(ast.get_source_segment(source, node) or "" for node in _parsed(source) if belongs(node)) + "\n"
