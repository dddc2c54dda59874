"""Values that have one component on each replica. Importing this loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar, NoReturn, Self

from distnb.errors import DistributedValueError, StructureError, UnknownNameError

__all__ = ["DistributedValues", "Mirrored", "PerReplica", "as_array"]

_CURE = (
    "Compute with it in a function that strategy.run calls, where it is the replica's own component: "
    "strategy.run(step, args=(value,)). strategy.reduce(op, value, axis) or strategy.gather(value, axis) make one "
    "value of all components, and strategy.local_results(value) returns the components that are available here."
)


class DistributedValues:
    """Base class of values with one component per replica. It is not instantiated directly.

    The components that are available depend on the process. On a replica it is the replica's own component;
    `strategy.local_results` returns the available ones.

    Args:
        components: One per replica, in order; or a dict of the available ones by replica id.
        num_replicas: The number of replicas that the value belongs to. Optional when all components are given.
        global_batch_size: The number of examples in the whole global batch, for a slice of a distributed dataset.

    Raises:
        StructureError: The components do not match the number of replicas.
    """

    __slots__ = ("__weakref__", "_components", "_global_batch_size", "_kinds", "_num_replicas")

    _word: ClassVar[str]  # the class's name in messages, also for a handle that represents such a value

    def __init__(
        self,
        components: Mapping[int, Any] | Sequence[Any],
        num_replicas: int | None = None,
        *,
        global_batch_size: int | None = None,
    ) -> None:
        here = dict(components) if isinstance(components, Mapping) else dict(enumerate(components))
        total = len(here) if num_replicas is None else num_replicas
        unfit = [replica for replica in here if not (isinstance(replica, int) and 0 <= replica < total)]
        if unfit or not here or (not isinstance(components, Mapping) and len(here) != total):
            raise StructureError(
                f"{self._word} needs one component for each of its {total} replica(s) and got them for "
                f"{sorted(here, key=repr)}. Give a sequence with one component per replica, or a dict "
                "{replica_id: component} together with num_replicas."
            )
        self._components = here
        self._num_replicas = total
        self._global_batch_size = global_batch_size
        self._kinds: tuple[str, ...] | None = None

    @classmethod
    def own(
        cls,
        replica_id: int,
        component: Any,
        num_replicas: int,
        global_batch_size: int | None = None,
        kinds: tuple[str, ...] | None = None,
    ) -> Self:
        """Return a replica's view of the value, with the replica's own component only. Unchecked, because each `run`
        makes one.

        `kinds` describes the component of each replica, if they are known to be of different kinds.
        """
        value = cls.__new__(cls)
        value._components = {replica_id: component}
        value._num_replicas = num_replicas
        value._global_batch_size = global_batch_size
        value._kinds = kinds
        return value

    @property
    def values(self) -> tuple[Any, ...]:
        """The components that are available here, in replica order."""
        return tuple(self._components[replica] for replica in sorted(self._components))

    @property
    def replica_ids(self) -> tuple[int, ...]:
        """The replicas whose components are available here."""
        return tuple(sorted(self._components))

    @property
    def num_replicas(self) -> int:
        """The number of replicas that the value belongs to, here or elsewhere."""
        return self._num_replicas

    @property
    def global_batch_size(self) -> int | None:
        """The number of examples in the whole global batch, if this is a slice of one; otherwise None."""
        return self._global_batch_size

    def component(self, replica_id: int) -> Any:
        """Return the component of one replica.

        Raises:
            DistributedValueError: The component is on another replica, or there is no such replica.
        """
        if replica_id in self._components:
            return self._components[replica_id]
        name = type(self).__name__
        if not 0 <= replica_id < self._num_replicas:
            raise DistributedValueError(
                f"A {name} of {self._num_replicas} replica(s) has no component {replica_id}: they are numbered from 0."
            )
        raise DistributedValueError(
            f"Component {replica_id} of this {name} is on another replica; available here: {list(self.replica_ids)}. "
            "strategy.local_results returns the available components; strategy.reduce and strategy.gather combine all."
        )

    def __eq__(self, other: object) -> bool:
        return self is other or self._refuse("cannot be compared")

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        name, kinds = type(self).__name__, self._kinds or ()
        shown = {replica: repr(self._components[replica]) for replica in sorted(self._components)}
        if len(shown) == self._num_replicas:
            return f"{name}:{{\n" + ",\n".join(f"  {replica}: {text}" for replica, text in shown.items()) + "\n}"
        # One line, since all replicas of a cell may print the value at once.
        shown = {replica: f"<{kind} on replica {replica}>" for replica, kind in enumerate(kinds)} | shown
        parts = [f"{replica}: {shown[replica]}" for replica in sorted(shown)]
        return f"{name}:{{{', '.join(parts if kinds else [*parts, '…'])}}}"

    def _repr_html_(self) -> str:
        # The drawing code is above this package in the import order, so it is imported when there is something to draw.
        return str(import_module("distnb.widgets.value_views.showing").as_html(self))

    def require_same_kind(self, method: str) -> None:
        """Refuse to combine components of different kinds.

        Raises:
            DistributedValueError: The components are known to be of different kinds. The message lists them by replica.
        """
        if self._kinds is not None:
            held = "; ".join(f"replica {replica} holds {kind}" for replica, kind in enumerate(self._kinds))
            raise DistributedValueError(
                f"{method} got a {self._word} whose components are of different kinds: {held}. It combines tensors, "
                "arrays or numbers of one kind. Return the same kind on every replica, such as an empty tensor or 0 "
                "in place of None; strategy.local_results(value) gives components of any type."
            )

    def __format__(self, spec: str) -> str:
        return str(self) if not spec else self._refuse(f"cannot be formatted as {spec!r}")

    # Operations of plain values, all refused --------------------------------------------------------------------------

    def _refuse(self, wish: str) -> NoReturn:
        raise DistributedValueError(
            f"A {self._word} {wish}: it has one component on each of {self._num_replicas} replica(s). {_CURE}"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnknownNameError(f"A {self._word}", name, cure=_CURE)

    def __array__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        self._refuse("cannot become an array")

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, _args: Any = (), _kwargs: Any = None) -> NoReturn:
        name = getattr(function, "__name__", "a torch function")
        raise DistributedValueError(f"{name} got a {cls._word} where one tensor is needed. {_CURE}")


def _refusing(wish: str) -> Callable[..., NoReturn]:
    def method(self: DistributedValues, *_args: Any) -> NoReturn:
        self._refuse(wish)

    return method


_REFUSED = {
    "has no truth value": "bool",
    "has no length": "len",
    "cannot be iterated": "iter contains",
    "cannot be indexed": "getitem setitem",
    "cannot become a number": "float int index complex round",
    "has no arithmetic": "neg pos abs invert add sub mul truediv floordiv mod pow matmul and or xor lshift rshift "
    "radd rsub rmul rtruediv rfloordiv rmod rpow rmatmul rand ror rxor "
    "iadd isub imul itruediv imatmul divmod",
    "cannot be compared": "lt le gt ge",
}
for _wish, _names in _REFUSED.items():
    for _name in _names.split():
        setattr(DistributedValues, f"__{_name}__", _refusing(_wish))


def as_array(value: Any) -> Any:
    """Return a tensor, an array or a number as an array."""
    import numpy

    return value.detach().cpu().numpy() if hasattr(value, "detach") else numpy.asarray(value)


class PerReplica(DistributedValues):
    """A value whose components may differ from replica to replica."""

    __slots__ = ()
    _word = "PerReplica"

    def numpy(self) -> tuple[Any, ...]:
        """Return the available components as arrays, in replica order."""
        return tuple(map(as_array, self.values))

    def item(self) -> tuple[Any, ...]:
        """Return the available components as numbers, in replica order."""
        return tuple(value.item() if hasattr(value, "item") else value for value in self.values)


class Mirrored(DistributedValues):
    """A value whose components are kept equal on all replicas."""

    __slots__ = ()
    _word = "Mirrored"
