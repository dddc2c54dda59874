"""Short forms of the messages that are sent again and again, so that a small call costs little.

Most calls of a function say what the one before said, with another number. Such a message is pickled in full once and
kept on both sides, under a small number; from then on a tuple says which one it is, and what differs. Likewise for
a reply that tells nothing but a result. Nobody else sees these forms: what is expanded is a message of `wire.messages`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from distnb.wire.bindings import Confirmation, Delivery, Described, Effects, Leaf, Repeat, Returned
from distnb.wire.codec import Parcel
from distnb.wire.messages import CallFunction, Reply

__all__ = ["CallReader", "CallWriter", "ReplyReader", "ReplyWriter", "calls_in", "spelled_out"]

_KEPT = 64
_REPEAT_LENGTH = 6


class CallWriter:
    """The notebook's side. What it gives must be sent, in this order, to every engine of the message's team."""

    def __init__(self) -> None:
        self._slots: OrderedDict[Any, tuple[int, Any]] = OrderedDict()

    def write(self, message: Any) -> Any:
        """A message, or its short form."""
        if type(message) is not CallFunction:
            return message
        delivery = message.delivery
        # By identity: these two are kept, so no other objects can have their addresses.
        key = (id(message.team), id(message.strategy), message.method, delivery.space, delivery.watch, delivery.handles)
        found = self._slots.get(key)
        if found is None:
            slot = len(self._slots)
            if slot == _KEPT:
                slot = self._slots.popitem(last=False)[1][0]
            message = replace(message, slot=slot)
            self._slots[key] = slot, (message.team, message.strategy)
            return message
        self._slots.move_to_end(key)
        if type(delivery) is Repeat:
            return found[0], message.program, delivery.serial, delivery.place, delivery.of, delivery.calls
        if not _is_usual(delivery):
            return message
        blob = delivery.blob
        short = blob.inline() if blob is not None else None
        confirmed = [(one.serial, one.nodes, one.names) for one in delivery.confirmed]
        return found[0], message.program, delivery.serial, short or blob, delivery.nodes, confirmed, delivery.release


def _is_usual(delivery: Delivery) -> bool:
    """Whether it differs from another of its kind in nothing that the short form does not tell."""
    return not (
        delivery.updates
        or delivery.delete
        or delivery.rejected
        or delivery.renamed
        or delivery.environment is not None
        or delivery.sources
        or delivery.modules
        or delivery.keep is not None
    )


class CallReader:
    """An engine's side: reads all messages in the order in which they come."""

    def __init__(self) -> None:
        self._kept: dict[int, CallFunction] = {}

    def read(self, message: Any) -> Any:
        """The message that the notebook meant."""
        if type(message) is not tuple:
            if type(message) is CallFunction and message.slot is not None:
                delivery = message.delivery
                if type(delivery) is Delivery:
                    delivery = replace(delivery, blob=None)  # arguments may be large
                self._kept[message.slot] = replace(message, delivery=delivery)
            return message
        kept = self._kept[message[0]]
        old = kept.delivery
        if len(message) == _REPEAT_LENGTH:
            _, program, *repeat = message
            return CallFunction(program, kept.team, kept.strategy, kept.method, Repeat(old.space, *repeat))
        _, program, serial, blob, nodes, confirmed, release = message
        delivery = Delivery(
            old.space,
            serial,
            Parcel([blob]) if type(blob) is bytes else blob,
            nodes=nodes,
            confirmed=tuple([Confirmation(*one) for one in confirmed]),
            release=release,
            watch=old.watch,
            handles=old.handles,
        )
        return CallFunction(program, kept.team, kept.strategy, kept.method, delivery)


def calls_in(message: Any) -> int:
    """How many replies a message asks for, as it was sent."""
    return int(message[-1]) if type(message) is tuple and len(message) == _REPEAT_LENGTH else 1


def spelled_out(message: CallFunction) -> Iterator[CallFunction]:
    """The calls that a message stands for, one by one."""
    delivery = message.delivery
    for _ in range(delivery.calls - 1 if type(delivery) is Repeat else 0):
        yield message
        delivery = Repeat(delivery.space, delivery.serial + 1, delivery.place, delivery.of)
        message = CallFunction(message.program + 1, message.team, message.strategy, message.method, delivery)
    yield message


class ReplyWriter:
    """An engine's side: results are described like earlier ones, but for their number."""

    def __init__(self) -> None:
        self._slots: dict[Described, int] = {}

    def write(self, reply: Reply) -> Any:
        """A reply, or its short form."""
        effects = reply.value
        if type(effects) is Returned and reply.status == "ok":
            return reply.program, effects.serial, None, effects.scalar
        if reply.status != "ok" or type(effects) is not Effects or not effects.only_result:
            return reply
        result = effects.result
        if type(result) is not Leaf:
            return reply
        described = result.described
        identity = described.identity
        if described.kind != "object" or described.digest is not None or identity is None or described.holds:
            return reply
        general = replace(described, identity=(0, identity[1]))
        slot = self._slots.get(general)
        if slot is not None:
            return reply.program, effects.serial, slot, None
        if len(self._slots) < _KEPT:
            slot = self._slots[general] = len(self._slots)
            return reply.program, effects.serial, slot, general
        return reply


class ReplyReader:
    """The notebook's side, of one engine."""

    def __init__(self) -> None:
        self._kept: dict[int, Described] = {}

    def read(self, message: Any) -> Any:
        """The reply that the engine meant."""
        if type(message) is not tuple:
            return message
        program, serial, slot, what = message
        if slot is None:
            return Reply(program, "ok", None, Returned(serial, what))
        if what is not None:
            self._kept[slot] = what
        general = self._kept[slot]
        assert general.identity is not None
        described = replace(general, identity=(serial, general.identity[1]))
        return Reply(program, "ok", value=Effects(serial, result=Leaf(described)))
