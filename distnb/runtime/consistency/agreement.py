"""The agreement of the replicas on the results of `run`, usually without a message.

At a function's first call in a program, the replicas compare the structures of their results. Tensors always become
PerReplica, so later results of the same structure that contain only tensors need no message. Plain Python values are
compared at each call, because `run` returns a plain value itself if it is the same on all replicas:

    return loss             a tensor: PerReplica; one message, in the first call
    return loss, "done"     (PerReplica, "done"); one message in each call
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from distnb.collectives.digests import digest_of_text
from distnb.errors import CollectiveMismatchError
from distnb.objects.plain import SCALARS
from distnb.runtime.consistency import loader_batches
from distnb.runtime.scopes.divided_objects import is_divided
from distnb.values.distributed import DistributedValues, PerReplica
from distnb.values.structure import LEAF, flatten, is_immutable, structure_of, unflatten, unlike_structures
from distnb.variables.variable import Variable

if TYPE_CHECKING:
    from distnb.collectives.group.interface import Group

__all__ = ["Agreement", "distributed"]


class Agreement:
    """The structures that each function of the current program has returned on all replicas alike.

    Attributes:
        is_left_to_caller: Whether nothing is compared: the caller receives every replica's result, and compares them.
    """

    def __init__(self) -> None:
        self._seen: dict[Any, set[Any]] = {}
        self._warned_of_batch = False
        self.is_left_to_caller = False

    def forget(self) -> None:
        """Discard all agreements when a program begins, because an interrupt may have left them incomplete."""
        self.is_left_to_caller = False
        self._seen.clear()

    def regroup(self, group: Group, fn: Callable[..., Any], result: Any, args: Any = ()) -> Any:
        """Convert one replica's result to a tree of PerReplica, divided and plain values, which `run` returns.

        Args:
            group: The replicas.
            fn: The function that `run` called.
            result: The function's result on this replica.
            args: The function's arguments.

        Raises:
            StructureError: Replicas returned different structures.
            DistributedValueError: The function returned a distributed value.
        """
        if self.is_left_to_caller:
            if type(result) in SCALARS:
                return result
            if type(result) is torch.Tensor:
                return PerReplica.own(group.rank, result, group.size)
        # `seen` has only structures that all replicas returned in the same call. It is therefore equal on all replicas,
        # and they make the same decision whether to communicate.
        seen = self._seen.setdefault(_code_of(fn), set())
        if type(result) is torch.Tensor and "tensor" in seen:
            return PerReplica.own(group.rank, result, group.size)
        if result is None and "none" in seen:
            return None
        leaves, shape = flatten(result)
        kinds = tuple([_kind(leaf) for leaf in leaves])
        structure = structure_of(result)
        plain, unlike = [kind != "tensor" for kind in kinds], [None] * len(kinds)
        if self.is_left_to_caller or ((structure, kinds) in seen and "plain" not in kinds):
            return _wrap(group, shape, leaves, plain, unlike)
        batch = 0 if self._warned_of_batch else loader_batches.digest_of_batch(args)
        values = [digest_of_text(_describe(kind, leaf)) for kind, leaf in zip(kinds, leaves, strict=True)]
        own = (structure, kinds, values, list(map(_held, leaves)), batch)
        try:
            is_equal = group.meet_after_call(digest_of_text(repr(own)))
            if is_equal is None:  # the function has raised on a replica, which may have caught the error
                return _wrap(group, shape, leaves, plain, unlike)
            gathered = [own] * group.size if is_equal else group.all_gather_object(own)
        except CollectiveMismatchError as error:
            error.add_note(
                f"strategy.run compares the results of {getattr(fn, '__name__', 'the function')} on all replicas "
                "when a result is of a new kind: in the first call, or None instead of a tensor, for example. Another "
                "replica has not returned yet, or returned the earlier kind. Return the same kind on every replica."
            )
            raise
        structures, all_kinds, all_values, all_held, batches = zip(*gathered, strict=True)
        _require_same_structure(structures)
        if batch and set(batches) == {batch}:
            self._warned_of_batch = True
            loader_batches.warn_of_equal_batches(group.size)
        if set(all_kinds) == {kinds}:
            seen.add((structure, kinds))
            if structure == LEAF:
                seen.add(kinds[0])
        columns = zip(plain, zip(*all_values, strict=True), strict=True)
        equal = [is_plain and len(set(column)) == 1 for is_plain, column in columns]
        return _wrap(group, shape, leaves, equal, _unlike_kinds(all_held))


def _wrap(
    group: Group, shape: Any, leaves: Sequence[Any], equal: Sequence[bool], unlike: Sequence[tuple[str, ...] | None]
) -> Any:
    """Build the result's tree: leaves that are equal on all replicas as they are, and a PerReplica for each other."""
    rank, size = group.rank, group.size
    three = zip(leaves, equal, unlike, strict=True)
    return unflatten(
        shape, [leaf if same else PerReplica.own(rank, leaf, size, None, kinds) for leaf, same, kinds in three]
    )


def _code_of(fn: Any) -> Any:
    """Return the code of a function, which identifies the function in every call and on every replica."""
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
    # A variable counts as the same value on every replica, even if its components differ, and so do a value's shards.
    if isinstance(leaf, torch.Tensor) and is_divided(leaf):
        return "divided"
    return f"variable {leaf.number}" if isinstance(leaf, Variable) and leaf.number else "tensor"


def _describe(kind: str, leaf: Any) -> str:
    return f"{type(leaf).__module__}.{type(leaf).__qualname__} {leaf!r}" if kind == "plain" else kind


def _require_same_structure(structures: Sequence[str]) -> None:
    for replica, other in enumerate(structures):
        if other != structures[0]:
            raise unlike_structures({0: structures[0], replica: other})


def _held(leaf: Any) -> str:
    """Return a short description of a value's type, such as "a tensor"."""
    if leaf is None:
        return "None"
    return "a tensor" if isinstance(leaf, torch.Tensor) else type(leaf).__name__


def _unlike_kinds(replicas: Sequence[Sequence[str]]) -> list[tuple[str, ...] | None]:
    """Return, for each leaf, the types that the replicas hold if these differ, else None."""
    return [column if len(set(column)) > 1 else None for column in zip(*replicas, strict=True)]


def distributed(group: Group, tree: Any) -> Any:
    """Return a distributed value with this replica's component. All replicas must call this function.

    Raises:
        StructureError: The replicas' components have different structures.
    """
    leaves, shape = flatten(tree)
    gathered = group.all_gather_object((structure_of(tree), list(map(_held, leaves))))
    _require_same_structure([structure for structure, _ in gathered])
    return _wrap(group, shape, leaves, [False] * len(leaves), _unlike_kinds([each for _, each in gathered]))
