"""Packing closures on the coordinator, and running them on a worker."""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import cloudpickle

from distnb.coordinator import references
from distnb.coordinator.remote_values import RemoteValue
from distnb.errors import CannotTravelError, EndOfDataset
from distnb.objects.packing import out_of_band
from distnb.wire.messages import RunClosure

__all__ = ["ClosureResult", "PackedClosure", "Packer", "Runner", "open_value"]

_numbers = itertools.count(1)  # a worker may serve several coordinators
_PLAIN = frozenset({type(None), bool, int, float, str})


class PackedValue(NamedTuple):
    """A value that travels."""

    data: bytes
    buffers: tuple[Any, ...]


class PackedClosure(NamedTuple):
    """A closure as it is queued.

    Attributes:
        needs: Numbers of the definitions that the worker must have.
        inputs: Results of other closures that are among the arguments.
    """

    data: bytes
    buffers: tuple[Any, ...]
    needs: tuple[int, ...]
    inputs: tuple[RemoteValue, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return len(self.data) + sum(memoryview(each).nbytes for each in self.buffers)


class ClosureResult(NamedTuple):
    """How a closure ended well on a worker.

    Attributes:
        value: What the function returned, to be opened by `open_value`.
        contributions: What metrics took in.
        staleness: Of each optimizer step, how many updates its copies had missed.
    """

    value: Any
    contributions: Any = None
    staleness: tuple[int, ...] = ()


class Packer:
    """Packs closures by value. A function that was packed before, as it is now, is sent to a worker once."""

    def __init__(self) -> None:
        self._definitions: dict[int, bytes] = {}
        self._needs: dict[int, tuple[int, ...]] = {}
        self._functions: dict[bytes, int] = {}

    def pack(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PackedClosure:
        """Pack a closure. CannotTravelError: something in it cannot be."""
        with references.collecting() as found:
            data, buffers = _pack((args, kwargs), "an argument")
        number = self.share(function)
        needs = dict.fromkeys([number, *self._needs[number], *found.needs])
        for each in found.needs:
            needs.update(dict.fromkeys(self._needs[each]))
        return PackedClosure(b"%d " % number + data, tuple(buffers), tuple(needs), tuple(found.inputs.values()))

    def share(self, value: Any) -> int:
        """The number of a definition, which each worker is sent once."""
        with references.collecting() as found:
            data, _ = _pack(value, "the function", inline=True)
        number = self._functions.get(data)
        if number is None:
            number = self._functions[data] = next(_numbers)
            self._definitions[number] = data
            inner = [each for need in found.needs for each in (need, *self._needs[need])]
            self._needs[number] = tuple(dict.fromkeys(inner))
        return number

    def definition(self, number: int) -> bytes:
        """What a worker is sent that needs it."""
        return self._definitions[number]

    def merge(self, contributions: Any) -> None:
        """Take in what metrics of a closure took in."""


class Runner:
    """Runs closures on a worker.

    Args:
        servers: The connections with the parameter servers.
        worker: Which worker this is.
    """

    def __init__(self, servers: Any, worker: int) -> None:
        self.worker = worker
        self._servers = servers
        self._definitions: dict[int, Any] = {}
        self._resources: dict[int, Any] = {}
        self._inputs: dict[int, Any] = {}
        references.place[:] = [self]

    def resource(self, number: int) -> Any:
        """The worker's own value, made at its first use."""
        if number not in self._resources:
            value = pickle.loads(self._definitions[number])
            make = getattr(value, "make_for_worker", None)
            self._resources[number] = value if make is None else make(self.worker)
        return self._resources[number]

    def input(self, number: int) -> Any:
        """Another closure's result."""
        return open_value(self._inputs[number])

    def run(self, message: RunClosure) -> ClosureResult:
        """Run a closure; raises what it does."""
        self._definitions.update(message.definitions)
        self._inputs = dict(message.inputs)
        number, _, data = bytes(message.data).partition(b" ")
        function = self.resource(int(number))
        args, kwargs = pickle.loads(data, buffers=message.buffers)
        try:
            value = function(*args, **kwargs)
        except StopIteration as end:
            raise EndOfDataset(
                "A closure took the next element of an iterator that has no more, and StopIteration left it. Datasets "
                "of workers are best endless: let the dataset function repeat its data (`while True: yield from …`), "
                "or catch StopIteration."
            ) from end
        return ClosureResult(value if type(value) in _PLAIN else PackedValue(*_pack(value, "the result")))


def open_value(value: Any) -> Any:
    """What `ClosureResult.value` stands for."""
    return pickle.loads(value.data, buffers=value.buffers) if type(value) is PackedValue else value


def _pack(value: Any, what: str, *, inline: bool = False) -> tuple[bytes, tuple[Any, ...]]:
    buffers: list[Any] = []
    file = io.BytesIO()
    try:
        cloudpickle.Pickler(file, protocol=5, buffer_callback=None if inline else out_of_band(buffers)).dump(value)
    except Exception as error:
        raise CannotTravelError(f"{what.capitalize()} of a closure cannot be sent: {error}") from error
    return file.getvalue(), tuple(buffers)
