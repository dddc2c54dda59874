"""The interface of algorithms that combine the replicas' tensors. This module does not load torch."""

from __future__ import annotations

import pickle
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import cloudpickle

from distnb.errors import OptionError
from distnb.options import CommunicationOptions, ReduceOp

if TYPE_CHECKING:
    import torch

    from distnb.collectives.group.interface import Group

__all__ = ["CrossDeviceOps", "PackedOps", "checked_ops", "checked_packs"]

_here: weakref.WeakValueDictionary[str, CrossDeviceOps] = weakref.WeakValueDictionary()
_packed: dict[str, bytes] = {}  # of the objects that were sent; like strategies, they are never released


class CrossDeviceOps(ABC):
    """The algorithm by which replicas of a `MirroredStrategy` combine tensors: gradients, in reduce, in all_reduce.

    A subclass implements `reduce_implementation`. Every replica is a separate process, which runs that method with its
    own tensor and communicates with the others through `replicas`. In a distributed cell or a script you can also use
    an algorithm directly: `reduce`, `batch_reduce`, `broadcast`.

    An object is sent to every process once, in the state that it had when the first strategy was made with it,
    including the functions and values that its methods read. Two strategies are the same object if their
    `cross_device_ops` are equal. To make the instances of a subclass equal, define `__eq__` and `__hash__`.

    Attributes:
        num_packs: The number of messages for tensors that are reduced together (those of one dtype in one backward pass
            or one call); 0 sends each tensor by itself.

    Example:
        >>> import distnb
        >>> class InHalfPrecision(distnb.CrossDeviceOps):
        ...     def reduce_implementation(self, op, tensor, replicas):
        ...         if not tensor.is_floating_point():
        ...             return replicas.all_reduce(tensor, op)
        ...         return replicas.all_reduce(tensor.half(), op).to(tensor.dtype)
        >>> distnb.MirroredStrategy(cross_device_ops=InHalfPrecision())
        MirroredStrategy(cross_device_ops=InHalfPrecision())
    """

    num_packs: int = 1
    is_groups_own: bool = False
    """Whether the replicas' group computes the sums itself, as it does without this algorithm."""
    _token: str

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        made = super().__new__(cls)
        object.__setattr__(made, "_token", uuid.uuid4().hex)
        _here[made._token] = made
        return made

    @abstractmethod
    def reduce_implementation(self, op: ReduceOp, tensor: torch.Tensor, replicas: Group) -> torch.Tensor:
        """Combine all replicas' tensors. Runs on every replica, at the same point of the program.

        Args:
            op: `ReduceOp.SUM`, or `ReduceOp.MEAN` (floating-point tensors only).
            tensor: This replica's tensor, contiguous. It may be modified and returned. Shape and dtype are the same on
                every replica. If several tensors are sent in one message, it is the one-dimensional concatenation of
                them, with a few numbers of distnb's own; reduce each element by itself.
            replicas: The communication with the other replicas: `rank`, `size`, `devices`, `all_reduce`, `reduce`,
                `broadcast`, `gather`, `all_gather` and `exchange`. Every replica must call the same methods in the same
                order.

        Returns:
            The elementwise sum or mean, in the same shape and dtype, the same bits on every replica.
        """

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any = None,
        options: CommunicationOptions | None = None,
    ) -> torch.Tensor:
        """Combine the components of a value, in cross-replica context. All replicas must call it together.

        Args:
            reduce_op: "sum" or "mean".
            per_replica_value: A result of `strategy.run`: a tensor, an array or a number on each replica.
            destinations: Devices of replicas, or a value on these devices. Every replica gets the result in any case.
            options: The communication options of this call.

        Returns:
            The result, on each replica; MEAN of integers is float64.

        Raises:
            ContextError: Called in an ordinary cell of a notebook, where the value's replicas are not.
            OptionError: The op is unknown, no replica computes at a destination, or the options cannot be honoured.
            DistributedValueError: The components are booleans, no numbers at all, or differ in shape or dtype.
        """
        from distnb.collectives.algorithms import direct

        return direct.reduce(self, ReduceOp.parse(reduce_op), per_replica_value, destinations, options)

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[torch.Tensor]:
        """Reduce several values, given as pairs of a value and its destinations."""
        return [self.reduce(reduce_op, value, destinations, options) for value, destinations in value_destination_pairs]

    def broadcast(self, tensor: Any, destinations: Any = None) -> torch.Tensor:
        """Return replica 0's tensor on all replicas. All of them call it, with tensors of the same shape and dtype.

        Args:
            tensor: A tensor, an array, a number, or a PerReplica of these.
            destinations: As in `reduce`.
        """
        from distnb.collectives.algorithms import direct

        return direct.broadcast(tensor, destinations)

    def check(self, devices: Sequence[str], nccl: bool) -> None:  # noqa: B027 (an algorithm may support all replicas)
        """Raise an error if it does not support these replicas. Called when a strategy is made and when it runs.

        Args:
            devices: Each replica's device, in replica order, such as "cuda:0".
            nccl: Whether NCCL connects the replicas, which needs a separate GPU for each.

        Raises:
            OptionError: The algorithm does not support them.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[[str, bytes], CrossDeviceOps], tuple[str, bytes]]:
        packed = _packed.get(self._token)
        if packed is None:
            packed = _packed[self._token] = self._pack()
        return _arrive, (self._token, packed)

    def _pack(self) -> bytes:
        """Pack the object for another process, by value, since its class may live in a notebook."""
        try:
            packed: bytes = cloudpickle.dumps((type(self), dict(vars(self))))
            return packed
        except Exception as error:
            raise OptionError(
                f"cross_device_ops={self!r} cannot be sent to the replicas: {error}. Its attributes, and what its "
                "methods read, must be values that can be pickled."
            ) from error


class PackedOps(CrossDeviceOps):
    """An algorithm whose only option is the number of packs. Two objects of one class with equal numbers are equal."""

    def __init__(self, num_packs: int = 1) -> None:
        self.num_packs = checked_packs(num_packs)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.num_packs == self.num_packs

    def __hash__(self) -> int:
        return hash((type(self), self.num_packs))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_packs={self.num_packs})"


def _arrive(token: str, packed: bytes) -> CrossDeviceOps:
    known = _here.get(token)
    if known is not None:
        return known
    cls, state = pickle.loads(packed)
    made: CrossDeviceOps = object.__new__(cls)
    vars(made).update(state)
    _here[token] = made
    return made


def checked_packs(num_packs: object) -> int:
    """Check a number of packs and return it.

    Raises:
        OptionError: It is negative or not a whole number.
    """
    if isinstance(num_packs, bool) or not isinstance(num_packs, int) or num_packs < 0:
        raise OptionError(f"num_packs={num_packs!r}: give a whole number, 0 or more; 0 packs nothing.")
    return num_packs


def checked_ops(ops: object) -> CrossDeviceOps:
    """Check the value of `cross_device_ops` and return it.

    Raises:
        OptionError: It is not an algorithm, or cannot be compared with others.
    """
    if not isinstance(ops, CrossDeviceOps):
        raise OptionError(
            f"cross_device_ops={ops!r} cannot be honoured: give an instance of distnb.NcclAllReduce, "
            "HierarchicalCopyAllReduce or ReductionToOneDevice, or of a subclass of distnb.CrossDeviceOps."
        )
    checked_packs(ops.num_packs)
    try:
        hash(ops)
    except TypeError as error:
        raise OptionError(
            f"cross_device_ops={ops!r} cannot be hashed ({error}), and equal ones must name the same strategy. Where "
            "a class defines __eq__ it needs a __hash__ too (a dataclass: frozen=True)."
        ) from error
    return ops
