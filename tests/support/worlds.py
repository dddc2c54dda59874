"""Worlds that run the same sequence of cells: plain IPython, engines in this process, a real cluster.

A sequence is a list of `ordinary(text)` and `distributed(text)` cells. The plain world runs both in one IPython; the
others run the distributed ones on replicas. `compare` then compares the namespaces name by name.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import inspect
import io
import linecache
import logging
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import numpy
import torch
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from distnb.engine.namespace.engine_namespace import EngineNamespace
from distnb.engine.namespace.engine_objects import ObjectsOfTeams
from distnb.engine.namespace.object_operations import carry_out
from distnb.notebook.handles.handle import HANDLES
from distnb.notebook.namespace.notebook_namespace import NotebookNamespace
from distnb.objects.modes.environment import apply_environment, capture_environment
from distnb.options import StrategySpec
from distnb.topology import Device, Team
from distnb.values import PerReplica, structure
from distnb.wire import codec
from distnb.wire.messages import Apply


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell of a sequence. `raises` is the exception that it must end with."""

    text: str
    distributed: bool
    raises: type[BaseException] | None = None


def ordinary(text: str, raises: type[BaseException] | None = None) -> Cell:
    return Cell(text, False, raises)


def distributed(text: str, raises: type[BaseException] | None = None) -> Cell:
    return Cell(text, True, raises)


def both(text: str) -> list[Cell]:
    """Return cells that run the same text here, then there, then here."""
    return [ordinary(text), distributed(text), ordinary(text), distributed(text)]


class Process:
    """An IPython of its own in this process."""

    def __init__(self) -> None:
        config = Config()
        config.HistoryManager.enabled = False
        self.shell = InteractiveShell(config=config)
        # At exit, each shell would clear itself with a full garbage collection: minutes for hundreds of them.
        atexit.unregister(self.shell.atexit_operations)
        self.user_ns = self.shell.user_ns
        self.user_ns["__name__"] = "__main__"
        self.user_ns["get_ipython"] = self.get_shell

        self._environment = capture_environment()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Give this process its own random state, working directory and default dtype in a block."""
        outside = capture_environment()
        apply_environment(self._environment)
        try:
            yield
        finally:
            self._environment = capture_environment()
            apply_environment(outside)

    def get_shell(self) -> InteractiveShell:
        return self.shell

    def run(self, text: str, number: int) -> None:
        """Run a cell to its end, or raise what it raises."""
        source = self.shell.transform_cell(text)
        name = f"<cell {number}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), self.user_ns)

    def names(self) -> dict[str, Any]:
        """Return the names that the user sees."""
        hidden = self.shell.user_ns_hidden
        return {
            name: value
            for name, value in self.user_ns.items()
            if not name.startswith("_")
            and name not in ("In", "Out", "exit", "quit", "open", "get_ipython", "rid")
            and hidden.get(name) is not value
        }


class PlainWorld:
    """The world in which one IPython runs everything."""

    def __init__(self) -> None:
        self.process = Process()
        self.process.user_ns["rid"] = lambda: 0
        self._number = 0

    def run(self, cell: Cell) -> None:
        self._number += 1
        self.process.run(cell.text, self._number)

    def names(self) -> dict[str, Any]:
        return self.process.names()


class DoubleWorld:
    """The world in which a notebook and its engines are namespaces of this process, with bytes between them."""

    def __init__(self, replicas: int = 2, *, via: Callable[[list[Any]], list[Any]] | None = None) -> None:
        self.notebook = Process()
        self.engines: list[Process] = []
        self.namespaces: list[EngineNamespace] = []
        for replica in range(replicas):
            self.add_engine(replica)
        self.team = Team(
            engines=tuple(range(replicas)),
            devices=(Device("cpu"),) * replicas,
            generation=1,
            store_host="",
            store_port=0,
        )
        self.notices: list[str] = []
        self.namespace = NotebookNamespace(self.notebook.user_ns, self.perform, self.notices.append)
        self.sent_nbytes = 0
        self._number = 0
        self._programs = 1000

    def add_engine(self, replica: int) -> None:
        """Add a new engine, in the place of an old one if there was one."""
        process = Process()
        process.user_ns["rid"] = functools.partial(int, replica)
        namespace = EngineNamespace(process.user_ns, ObjectsOfTeams(), engine=replica, reserved=("rid", "_raised"))
        if replica < len(self.engines):
            self.engines[replica], self.namespaces[replica] = process, namespace
        else:
            self.engines.append(process)
            self.namespaces.append(namespace)

    def _send(self, message: Any) -> Any:
        frames = [bytes(frame) for frame in codec.encode(message)]
        self.sent_nbytes += sum(map(len, frames))
        return codec.decode(frames)

    def run(self, cell: Cell, team: Team | None = None) -> None:
        self._number += 1
        if not cell.distributed:
            self.notebook.run(cell.text, self._number)
            return
        team = team or self.team
        snapshot = self.namespace.outgoing(cell.text, team)
        results, errors = {}, []
        for replica, engine in enumerate(team.engines):
            namespace, process = self.namespaces[engine], self.engines[engine]
            with process.active():
                namespace.open(self._send(snapshot), replica)
                mark = namespace.begin(cell.text)
                try:
                    process.run(cell.text, self._number)
                    namespace.refuse_placeholders(mark)
                except Exception as error:
                    errors.append(error)
                results[replica] = self._send(namespace.finish(mark))
        self.namespace.incoming(team, results)
        if errors:
            raise errors[0]

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Do what `strategy.run` in an ordinary cell does with the namespace."""
        snapshot = self.namespace.outgoing_call((function, args, kwargs), {}, self.team)
        results: dict[int, Any] = {}
        errors: list[BaseException] = []
        for replica in range(len(self.namespaces)):
            with self.engines[replica].active():
                try:
                    results[replica] = self._send(self._call_on(replica, self._send(snapshot)))
                except Exception as error:
                    errors.append(error)
                    results[replica] = self._send(self.namespaces[replica].abandon_call())
        if errors:
            self.namespace.failed(snapshot, results)
            raise errors[0]
        return self.namespace.result(self.team, results)

    def _call_on(self, replica: int, snapshot: Any) -> Any:
        namespace, size = self.namespaces[replica], len(self.namespaces)
        args, _ = namespace.open_call(snapshot, replica)
        function, own_args, own_kwargs = structure.select(args, replica)
        result = structure.map_structure(
            lambda leaf: leaf if structure.is_immutable(leaf) else PerReplica.own(replica, leaf, size),
            function(*own_args, **own_kwargs),
        )
        return namespace.close_call(result)

    def perform(
        self,
        engines: Sequence[int],
        operation: str,
        target: Any,
        payload: Any = None,
        give_up: Callable[[dict[int, Any]], None] = lambda results: None,
    ) -> dict[int, Any]:
        self._programs += 1
        message = Apply(program=self._programs, operation=operation, target=target, team=self.team, payload=payload)
        answers: dict[int, Any] = {}
        errors: list[BaseException] = []
        for engine in engines:
            with self.engines[engine].active():
                try:
                    answers[engine] = self._send(carry_out(self.namespaces[engine], self._send(message)))
                except Exception as error:
                    errors.append(error)
                    answers[engine] = self._send(self.namespaces[engine].abandon_call())
        if errors:
            answered = {engines.index(engine): answer for engine, answer in answers.items() if answer is not None}
            give_up(answered if len(answered) == len(answers) else {})
            raise errors[0]
        return answers

    def names(self) -> dict[str, Any]:
        return self.notebook.names()


@contextmanager
def modes_kept() -> Iterator[None]:
    """Restore the ambient modes of this process after a block, so that another world begins in them, too."""
    before = capture_environment()
    try:
        yield
    finally:
        apply_environment(before)


def run_all(world: Any, cells: Iterable[Cell]) -> str:
    """Run a sequence, and return its output."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        for cell in cells:
            try:
                world.run(cell)
            except Exception as error:
                if cell.raises is None or not isinstance(error, cell.raises):
                    raise
            else:
                if cell.raises is not None:
                    raise AssertionError(f"{cell.text!r} was to raise {cell.raises.__name__}")
    return printed.getvalue()


# -- comparing -----------------------------------------------------------------------------------------------------


def compare(plain: dict[str, Any], other: dict[str, Any]) -> None:
    """Assert that two namespaces are the same: names, values on every replica, and which names share an object."""
    assert sorted(plain) == sorted(other)
    for name in plain:
        for component in components(other[name]):
            difference = differ(plain[name], component, name)
            assert difference is None, difference
    names = sorted(plain)
    for first in names:
        for second in names:
            if first < second and not _is_immutable(plain[first]):
                shared = plain[first] is plain[second]
                assert shared == (other[first] is other[second]), f"{first} is {second}: {shared} in one IPython"


def compare_results(plain: dict[str, Any], other: dict[str, Any]) -> None:
    """Assert that two namespaces have the same names and plain values, and that the second one has no handles."""
    assert sorted(plain) == sorted(other)
    assert [name for name, value in other.items() if isinstance(value, HANDLES)] == []
    results = [name for name, value in plain.items() if type(value) in (str, tuple, bool, int)]
    assert {name: plain[name] for name in results} == {name: other[name] for name in results}


def components(value: Any) -> tuple[Any, ...]:
    """Return a value as each replica has it."""
    return value.values if isinstance(value, HANDLES) else (value,)


def _is_immutable(value: Any) -> bool:
    return isinstance(value, int | float | str | bytes | bool | tuple | types.ModuleType | type(None) | frozenset)


def differ(one: Any, other: Any, where: str, seen: frozenset[tuple[int, int]] = frozenset()) -> str | None:
    """Return in words where two values differ; None if they do not."""
    if isinstance(other, HANDLES):
        other = other.values[0]
    if (id(one), id(other)) in seen:
        return None
    seen |= {(id(one), id(other))}
    if isinstance(one, type) and isinstance(other, type):
        alike = one.__qualname__ == other.__qualname__ and _attributes(one) == _attributes(other)
        alike = alike and list(inspect.get_annotations(one)) == list(inspect.get_annotations(other))
        return None if alike else f"{where}: {one} and {other}: {_attributes(one) ^ _attributes(other)}"
    if type(one).__qualname__ != type(other).__qualname__:
        return f"{where}: {type(one)} and {type(other)}"
    if isinstance(one, torch.Tensor):
        alike = (
            one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(one, other)
            and one.requires_grad == other.requires_grad
        )
        return None if alike else f"{where}: {one} and {other}"
    if isinstance(one, torch.Generator):
        return None if torch.equal(one.get_state(), other.get_state()) else f"{where}: other states"
    if isinstance(one, logging.Logger):  # it refers to all loggers of the process
        return None if (one.name, one.level) == (other.name, other.level) else f"{where}: {one} and {other}"
    if isinstance(one, numpy.random.Generator):
        return None if one.bit_generator.state == other.bit_generator.state else f"{where}: other states"
    if isinstance(one, types.BuiltinFunctionType):
        return differ(one.__self__, other.__self__, f"{where}.__self__", seen)
    if isinstance(one, numpy.ndarray):
        return None if one.dtype == other.dtype and numpy.array_equal(one, other) else f"{where}: {one} and {other}"
    if isinstance(one, dict):
        if list(map(str, one)) != list(map(str, other)):
            return f"{where}: keys {list(one)} and {list(other)}"
        return _first(
            differ(one[key], value, f"{where}[{key!r}]", seen) for key, value in zip(one, other.values(), strict=True)
        )
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return f"{where}: {one} and {other}"
        return _first(differ(a, b, f"{where}[{i}]", seen) for i, (a, b) in enumerate(zip(one, other, strict=True)))
    if isinstance(one, types.FunctionType):
        return _differ_functions(one, other, where, seen)
    if isinstance(one, types.ModuleType):
        return None if one.__name__ == other.__name__ else f"{where}: {one} and {other}"
    if type(one).__module__.split(".")[0] == "pandas":
        return None if one.equals(other) else f"{where}: {one} and {other}"
    if type(one).__module__ == "__main__" or hasattr(one, "__dict__"):
        return differ(vars(one), vars(other), f"vars({where})", seen) if hasattr(one, "__dict__") else None
    if hasattr(one, "__next__"):
        return None  # examining it would change it
    return None if one == other or (one != one and other != other) else f"{where}: {one!r} and {other!r}"


def _attributes(cls: type) -> set[str]:
    return set(vars(cls)) - {
        *("__dict__", "__doc__", "__module__", "__slotnames__", "__weakref__"),
        *("__annotate_func__", "__annotations_cache__", "__annotations__", "__classdictcell__"),  # compared as such
        *("__firstlineno__", "__static_attributes__"),  # notes of the compiler, since Python 3.13
    }


def _differ_functions(one: Any, other: Any, where: str, seen: Any) -> str | None:
    if one.__code__.co_code != other.__code__.co_code or one.__name__ != other.__name__:
        return f"{where}: the code of {one} and {other}"
    cells = [[cell.cell_contents for cell in function.__closure__ or ()] for function in (one, other)]
    return differ(cells[0], cells[1], f"closure of {where}", seen) or differ(
        one.__defaults__, other.__defaults__, f"defaults of {where}", seen
    )


def _first(found: Iterable[str | None]) -> str | None:
    return next((difference for difference in found if difference is not None), None)


class ClusterWorld:
    """The world in which this process is the notebook of a real cluster, used for one sequence after another."""

    def __init__(self, session: Any, notebook: Process) -> None:
        self._session = session
        self.notebook = notebook
        self._number = 0
        for name in list(self.names()):
            del notebook.user_ns[name]

    @property
    def namespace(self) -> NotebookNamespace:
        found: NotebookNamespace = self._session.namespace
        return found

    def run(self, cell: Cell) -> None:
        self._number += 1
        if cell.distributed:
            self._session.cells.run(cell.text, StrategySpec(kind="mirrored"), filename=f"<cell {self._number}>")
        else:
            self.notebook.run(cell.text, self._number)

    def names(self) -> dict[str, Any]:
        return self.notebook.names()
