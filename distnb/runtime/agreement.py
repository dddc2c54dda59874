"""What `run` returned on the other replicas, as far as it must be known: with no message in the usual case.

Tensors become PerReplica wherever they are, so nothing has to be said about them once the replicas have seen, at a
function's first call in a program, that they return the same structure. Plain Python values are compared at each call,
since the same value on all replicas is to be that value.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from distnb.accelerators import torch_device
from distnb.values.distributed import DistributedValues, PerReplica
from distnb.values.structure import Spec, flatten, is_immutable, unflatten, unlike_structures
from distnb.variables.variable import Variable
from distnb.wire.immutables import SCALARS

if TYPE_CHECKING:
    from distnb.collectives.groups import Group

__all__ = ["Agreement"]


class Agreement:
    """The structures that the functions of one program have been seen to return, on every replica.

    Attributes:
        is_left_to_caller: See `left_to_caller`.
    """

    def __init__(self) -> None:
        self._seen: dict[Any, set[Any]] = {}
        self.is_left_to_caller = False

    def left_to_caller(self) -> AbstractContextManager[None]:
        """Compare nothing meanwhile: whoever calls gets every replica's result, and compares them itself."""
        return _LeftToCaller(self)

    def forget(self) -> None:
        """A new program begins. What an earlier one agreed on may have been interrupted half-way."""
        self._seen.clear()

    def regroup(self, group: Group, fn: Callable[..., Any], result: Any) -> Any:
        """One replica's result as a structure of PerReplica and plain values.

        Raises:
            StructureError: Replicas returned different structures.
            DistributedValueError: The function returned a distributed value.
        """
        if self.is_left_to_caller and type(result) in SCALARS:
            return result
        seen = self._seen.setdefault(_code_of(fn), set())
        if type(result) is torch.Tensor and "tensor" in seen:
            return PerReplica.own(group.rank, result, group.size)
        if result is None and "none" in seen:
            return None
        leaves, shape = flatten(result)
        kinds = tuple([_kind(leaf) for leaf in leaves])
        spec: Spec = shape.spec
        if self.is_left_to_caller:
            equal: Sequence[bool] = [kind != "tensor" for kind in kinds]
            return self._wrap(group, shape, leaves, equal)
        signature: Any = (spec, kinds)
        plain = [place for place, kind in enumerate(kinds) if kind == "plain"]
        if signature in seen and not plain:
            equal = [kind != "tensor" for kind in kinds]
        else:
            equal = _compare(group, spec, kinds, leaves)
            seen.add(signature)
            if spec.kind == "leaf":
                seen.add(kinds[0])
        return self._wrap(group, shape, leaves, equal)

    def _wrap(self, group: Group, shape: Any, leaves: Sequence[Any], equal: Sequence[bool]) -> Any:
        pairs = zip(leaves, equal, strict=True)
        return unflatten(
            shape, [leaf if same else PerReplica.own(group.rank, leaf, group.size) for leaf, same in pairs]
        )


class _LeftToCaller(AbstractContextManager[None]):
    # A class, since it is around every call from the notebook: a generator would cost three times as much.

    __slots__ = ("_agreement", "_before")

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement

    def __enter__(self) -> None:
        self._before, self._agreement.is_left_to_caller = self._agreement.is_left_to_caller, True

    def __exit__(self, *error: object) -> None:
        self._agreement.is_left_to_caller = self._before


def _code_of(fn: Any) -> Any:
    """What is the same for one function at every call, and on every replica at the same call."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if isinstance(fn, types.MethodType):
        fn = fn.__func__
    return getattr(fn, "__code__", type(fn))


def _kind(leaf: Any) -> str:
    if leaf is None:
        return "none"
    if isinstance(leaf, DistributedValues):
        leaf._refuse("was returned by a function that strategy.run called, and cannot be a replica's result")
    if is_immutable(leaf):
        return "plain"
    # One variable is the same thing on every replica, whatever its components are.
    return f"variable {leaf.number}" if isinstance(leaf, Variable) and leaf.number else "tensor"


def _describe(kind: str, leaf: Any) -> str:
    return f"{type(leaf).__module__}.{type(leaf).__qualname__} {leaf!r}" if kind == "plain" else kind


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def _compare(group: Group, spec: Spec, kinds: Sequence[str], leaves: Sequence[Any]) -> list[bool]:
    """Whether each leaf is the same plain value on all replicas. All replicas call it together."""
    descriptions = [_describe(kind, leaf) for kind, leaf in zip(kinds, leaves, strict=True)]
    mine = [_digest(repr(spec)), _digest("\n".join(descriptions))]
    others = group.all_gather(torch.tensor(mine, dtype=torch.int64, device=torch_device(group.device)))
    if all(other.tolist() == mine for other in others):
        return [kind != "tensor" for kind in kinds]
    told = group.all_gather_object((spec, descriptions))
    for replica, (other, _) in enumerate(told):
        if other != told[0][0]:
            raise unlike_structures({0: told[0][0], replica: other})
    columns = zip(*(texts for _, texts in told), strict=True)
    return [kind != "tensor" and len(set(column)) == 1 for kind, column in zip(kinds, columns, strict=True)]
