"""The messages of calls by plan, which are as small as possible. See `distnb/notebook/README.md`.

Values in them are plain: numbers, short strings, and containers of them, which marshal writes. A handle is
sent as the list `[identity, kind]`, data that the engines have as `[name, SECTION]`, so a list is sent as
`[None, *items]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

from distnb.values.structure import flatten, map_structure
from distnb.wire.codec import give_codes, give_plain_form
from distnb.wire.described_values import (
    RETURNED,
    WRAPPED,
    DescribedObject,
    Leaf,
    PlainValue,
    Result,
    Summary,
    leaf_name,
)
from distnb.wire.messages import ObjectId

__all__ = ["BARE", "SECTION", "SHORT", "OwnTensor", "OwnTensors", "PlannedCall", "PlannedReply", "described", "opened"]

BARE = frozenset({type(None), bool, int, float, str})
"""The types of plain values in these messages."""

SHORT = 400
"""The number of characters of the longest string in them."""


SECTION = "section"
"""The kind of an argument that the engines have by the name of its section."""


class PlannedCall(NamedTuple):
    """Order to repeat a call.

    Attributes:
        program: The serial number of the program.
        plan: The program that made the plan.
        serial: The serial of the call's snapshot.
        released: The ids of engine objects that the notebook no longer holds.
        arguments: The function's arguments `(args, kwargs)`.
        rebound: The values of names that were bound to others before.
    """

    program: int
    plan: int
    serial: int
    released: tuple[ObjectId, ...]
    arguments: Any
    rebound: dict[str, Any]


OwnTensor: TypeAlias = tuple[str, str, str, float | int | complex | None, bool]
"""A tensor that a call returned, such as a step's loss: each replica's own. It has the shape, dtype, device, number and
graph of its `Summary`, in a plain tuple, which marshal writes."""


def described(tensor: OwnTensor, identity: ObjectId) -> DescribedObject:
    """Describe a tensor as the object of an id."""
    shape, dtype, device, number, graph = tensor
    summary = Summary(
        type="torch.Tensor", text=None, shape=shape, dtype=dtype, device=device, number=number, graph=graph
    )
    return DescribedObject(identity=identity, summary=summary, sharing=WRAPPED)


class OwnTensors(NamedTuple):
    """A result of tensors that are each replica's own, and of plain values.

    Attributes:
        tree: The result, with `...` in place of each tensor.
        tensors: The tensors.
    """

    tree: Any
    tensors: tuple[OwnTensor, ...]

    def identities(self, serial: int) -> list[ObjectId]:
        """Return the ids of the tensors as the result of a call."""
        if self.tree is ...:
            return [(serial, RETURNED)]
        return [(serial, leaf_name(RETURNED, index)) for index, leaf in enumerate(flatten(self.tree)[0]) if leaf is ...]

    def filled(self, tensors: Iterable[Any], plain: Callable[[Any], Any] = lambda value: value) -> Any:
        """Return the result with these tensors, and with `plain(value)` for each plain value."""
        each = iter(tensors)
        return map_structure(lambda leaf: next(each) if leaf is ... else plain(leaf), self.tree)

    def described(self, serial: int) -> Any:
        """Describe it as the result of a call: a structure of `Leaf`s."""
        tensors = zip(self.tensors, self.identities(serial), strict=True)
        leaves = (Leaf(described(tensor, identity)) for tensor, identity in tensors)
        return self.filled(leaves, lambda value: Leaf(PlainValue(value)))


class _PlannedReply(NamedTuple):
    program: int
    serial: int
    steps: int
    returned: Any


class PlannedReply(_PlannedReply):
    """The reply to a planned call that had no effect except its result. In other cases the reply is a `Reply`.

    Attributes:
        program, steps: As in `Reply`.
        serial: The serial of the call's snapshot.
        returned: The result: a value of one of the `BARE` types, `OwnTensors`, or a structure of `Leaf`s.
        status, error, profile, seconds, caught, changed: As in `Reply`, always the same.
    """

    __slots__ = ()
    status: ClassVar[Literal["ok"]] = "ok"
    error: ClassVar = None
    profile: ClassVar = None
    seconds: ClassVar = 0.0
    caught: ClassVar = False
    changed: ClassVar[dict[str, int]] = {}

    @property
    def value(self) -> Result:
        """The effects of the call, as those of an ordinary call are described."""
        returned = self.returned
        if type(returned) in BARE:
            returned = Leaf(PlainValue(returned))
        elif type(returned) is OwnTensors:
            returned = returned.described(self.serial)
        return Result(serial=self.serial, result=returned)


def opened(value: Any, resolve: Callable[[Any, str], Any]) -> Any:
    """Return a value that was sent in a planned call. `resolve` gets the two items of the lists above."""
    kind = type(value)
    if kind is list:
        return [opened(each, resolve) for each in value[1:]] if value[0] is None else resolve(*value)
    if kind is tuple:
        return tuple([opened(each, resolve) for each in value])
    if kind is dict:
        return {name: opened(each, resolve) for name, each in value.items()}
    return value


def _plain_reply(reply: PlannedReply) -> tuple[Any, ...]:
    returned = reply.returned
    if type(returned) is not OwnTensors:
        return tuple(reply)
    return (*reply[:3], *returned)


def _reply_of(fields: list[Any]) -> PlannedReply:
    if len(fields) > len(PlannedReply._fields):
        fields[3:] = [_made(OwnTensors, fields[3:])]
    return _made(PlannedReply, fields)


_made = tuple.__new__  # `_make` checks the number of fields, and takes longer than the rest of the decoding

give_plain_form(1, PlannedCall, tuple, partial(_made, PlannedCall))
give_plain_form(2, PlannedReply, _plain_reply, _reply_of)
give_codes(48, PlannedCall, PlannedReply, OwnTensors)
