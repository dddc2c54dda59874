"""Describing an engine's objects to the notebook: what they are, how they look, whether replicas agree on them."""

from __future__ import annotations

import contextlib
import reprlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from distnb.engine.namespace.engine_objects import EngineObjects
from distnb.objects.code import is_code
from distnb.objects.looking import Look, Looker
from distnb.objects.memory import dense_tensor, is_stored
from distnb.objects.plain import SCALARS, is_importable, is_plain
from distnb.strategies.scope import is_apart, is_mirrored, is_read_together
from distnb.values import DistributedValues, structure
from distnb.wire.exchange import Described, Leaf, Summary
from distnb.wire.messages import ObjectId

__all__ = ["Describer", "own_part", "summarise"]

_SHORT_ELEMENTS = 64
_SHORT_CHARACTERS = 400


class Describer:
    """Describes what a program assigned or returned on one engine; new objects get ids of its snapshot's serial.

    Attributes:
        plain: Immutable values that are no scalars, by their paths.
        sent: Functions, classes and the notebook's own objects, which are sent by value.
        fresh: Objects that what is sent refers to, and that stay.
    """

    def __init__(self, objects: EngineObjects, serial: int) -> None:
        self._objects = objects
        self._serial = serial
        self.plain: dict[str, Any] = {}
        self.sent: dict[str, Any] = {}
        self._numbers: dict[str, int | None] = {}
        self.look = Look()
        self.fresh: dict[ObjectId, Described] = {}

    def register(self, value: Any, path: str) -> None:
        """Give a value that was assigned an id; what is to be sent by value is noted."""
        if issubclass(type(value), types.ModuleType) or is_plain(value):
            return
        objects, tracker = self._objects, self._objects.tracker
        number = tracker.number_of(value)
        by_value = objects.id_of(value) is None and (number is not None or is_code(value))
        if by_value:
            look = tracker.look({path: value})
            by_value = not look.refused
        if by_value:
            self.sent[path] = value
            self._numbers[path] = number
            self.look.digests.update(look.digests)
            self.look.classes.update(look.classes)
        objects.own((self._serial, path), value, by_value=by_value)

    def value(self, value: Any, path: str, *, brief: bool = False) -> Described:
        """Describe what a name or a result is. A new object is kept under `path`."""
        if issubclass(type(value), types.ModuleType):
            known = self._objects.id_of(value)
            identity = known if known is not None else self._objects.own((self._serial, path), value)
            return Described("module", value=value.__name__, identity=identity)
        if type(value) in SCALARS or (type(value) is str and len(value) < _SHORT_CHARACTERS):
            return Described("plain", None, value)
        if is_plain(value):
            self.plain[path] = value
            return Described("plain")
        if path in self.sent:
            return Described("sent", self.look.digests[path], self._numbers[path], (self._serial, path))
        tracker = self._objects.tracker
        number = tracker.number_of(value)
        if number is not None and self._objects.id_of(value) is None:
            return Described("tracked", value=number)
        return self.object(value, self._objects.own((self._serial, path), value), brief=brief)

    def object(self, value: Any, identity: ObjectId, *, brief: bool = False) -> Described:
        """Describe an object that stays on the engine, behind a handle.

        One that cannot be described affects no other: its summary says why.
        """
        try:
            return self._object(value, identity, brief=brief)
        except Exception as error:  # whatever a user's class or a rare kind of tensor raises  # noqa: BLE001
            text = f"<{type(value).__name__}, which cannot be described: {type(error).__name__}: {error}>"
            return Described("object", identity=identity, summary=Summary(_type_name(type(value)), _shortened(text)))

    def _object(self, value: Any, identity: ObjectId, *, brief: bool) -> Described:
        mirrored, together = is_mirrored(value), is_read_together(value)
        wrapped = isinstance(value, DistributedValues)
        # The content of a distributed value is not asked for: looking at it would wait for the device.
        compared = not (mirrored or wrapped or is_apart(value))
        # This replica's part is not what it is: that is asked for when it is shown.
        summary = summarise(value, brief=brief or together)
        if summary.number is not None and not wrapped:
            return self._number(value, identity, summary)
        survey = None if wrapped else Surveyor(self._objects, value, contents=compared)
        return Described(
            "object",
            survey.digest if survey is not None and compared else None,
            identity=identity,
            summary=summary,
            mirrored=mirrored,
            together=together,
            wrapped=wrapped,
            reads=tuple(sorted(survey.seen.names)) if survey is not None else (),
            holds=tuple(survey.holds) if survey is not None else (),
        )

    def _number(self, value: Any, identity: ObjectId, summary: Summary) -> Described:
        """A tensor of one number: there is no need to pickle it, as the losses of all steps."""
        tracker = self._objects.tracker
        number = tracker.number_of_memory(value.data_ptr(), 1)
        holds = () if number is None else (tracker.name_of(number),)
        digest = f"{summary.dtype} {summary.number!r} {summary.graph}".encode()
        return Described("object", digest, identity=identity, summary=summary, holds=holds)

    def register_fresh(self, value: Any) -> ObjectId:
        """An object that what is sent refers to, and that stays: the notebook gets a handle."""
        identity = self._objects.own((self._serial, f"*{len(self.fresh)}"), value)
        self.fresh[identity] = Described("object", identity=identity)  # it may hold itself
        self.fresh[identity] = self.object(value, identity, brief=True)
        return identity

    def items(self, values: list[Any]) -> list[Leaf]:
        """The items of a container, each a leaf whatever it is."""
        return [Leaf(self.value(item, f"r{index}")) for index, item in enumerate(values)]

    def tree(self, value: Any) -> Any:
        """A result's structure with a `Leaf` for each of its leaves."""
        if type(value) in SCALARS:
            return Leaf(Described("plain", None, value))
        try:
            leaves, shape = structure.flatten(value)
        except Exception:  # a container that holds itself, or does as it likes  # noqa: BLE001
            return Leaf(self.value(value, "r", brief=True))
        if len(leaves) == 1 and leaves[0] is value:
            return Leaf(self.value(value, "r", brief=True))
        described = [Leaf(self.value(leaf, f"r{index}", brief=True)) for index, leaf in enumerate(leaves)]
        try:
            return structure.unflatten(shape, described)
        except Exception:  # a container that checks what it is given  # noqa: BLE001
            return Leaf(self.value(value, "r", brief=True))


class Surveyor(Looker):
    """What is in an engine's object, told by pickling it; `contents` says whether its tensors' count.

    Attributes:
        digest: Of the object; None where it cannot be pickled.
        holds: Names of the notebook's whose objects are within it, and ids of engine objects that are.
    """

    def __init__(self, objects: EngineObjects, value: Any, *, contents: bool) -> None:
        tracker = objects.tracker
        self.digest: bytes | None = None
        holds: dict[str | ObjectId, None] = {}
        self.holds = holds
        self._objects = objects
        self._root = value
        self._contents = contents

        def note(obj: Any) -> None:
            number = tracker.number_of(obj)
            if number is not None:
                holds[tracker.name_of(number)] = None
            elif type(obj) in (list, dict, set) and obj is not value:
                identity = objects.id_of(obj)
                if identity is not None:
                    holds[identity] = None

        if tracker.names or objects.owns_containers:
            self.persistent_id = note  # asked for every object: only where there is something to be found
        super().__init__(tracker.side)
        with contextlib.suppress(Exception):  # many objects cannot be pickled: then nothing is known of them
            self.digest = self.digest_of([value])

    def reference(self, obj: Any) -> Any:
        if obj is self._root:
            return None
        identity = self._objects.id_of(obj)
        if identity is not None:
            self.holds[identity] = None
        return super().reference(obj)

    def array(self, array: Any) -> Any:
        self._note_memory(array.__array_interface__["data"][0])
        return super().array(array)

    def _note_memory(self, start: int) -> None:
        tracker = self._objects.tracker
        number = tracker.number_of_memory(start, 1)
        if number is not None:
            self.holds[tracker.name_of(number)] = None

    def tensor(self, tensor: Any) -> Any:
        if dense_tensor(tensor):
            self._note_memory(tensor.data_ptr())
        return super().tensor(tensor) if self._contents else (str, (f"{tensor.dtype}{tuple(tensor.shape)}",))


def summarise(value: Any, *, brief: bool = False) -> Summary:
    """A description short enough to be sent with every effect.

    A brief one has nothing that costs time or waits for a device; the notebook asks again when it is shown.
    """
    shown = own_part(value)
    name = _type_name(type(shown))
    if _is_array(shown) or _is_variable(shown):
        shape, dtype = _shape_text(shown), str(shown.dtype).removeprefix("torch.")
        text = None if brief or _nbytes(shown) > _SHORT_ELEMENTS * 16 else _short_text(shown)
        graph = name == "torch.Tensor" and shown.grad_fn is not None
        at_hand = name == "torch.Tensor" and shape == "()" and shown.is_cpu and (graph or not shown.requires_grad)
        number = shown.item() if at_hand and dense_tensor(shown) and is_stored(shown) else None
        return Summary(name, text, shape, dtype, str(getattr(shown, "device", "cpu")), number=number, graph=graph)
    if brief:
        return Summary(name, None, iterates=isinstance(shown, Iterator))
    return Summary(name, _short_text(shown), attributes=_names(shown), iterates=isinstance(shown, Iterator))


def _shape_text(array: Any) -> str:
    """Return an array's shape, as text; "" for one whose rows have lengths of their own."""
    try:
        return str(tuple(array.shape))
    except RuntimeError:  # of a nested tensor
        return ""


def _nbytes(array: Any) -> int:
    """Return an array's size in bytes; of a sparse tensor, which has no `nbytes`, that of an equal dense one."""
    size = array.numel() * array.element_size() if isinstance(array, torch.Tensor) else array.nbytes
    return int(size)


def _is_variable(value: Any) -> bool:
    variables = sys.modules.get("distnb.variables.variable")
    return variables is not None and isinstance(value, variables.Variable)


def own_part(value: Any) -> Any:
    """A value, or a structure that holds distributed ones, as this replica has it: with its own components.

    A structure that cannot be taken apart or put together again is given as it is: one that holds itself, or a
    container whose class does as it likes. Nothing is to fail because it is looked at.
    """
    try:
        if not structure.has_distributed(value):
            return value
        leaves, shape = structure.flatten(value)
    except Exception:  # noqa: BLE001  # RecursionError, and whatever a container raises when it is iterated
        return value
    own = [leaf.values[0] if isinstance(leaf, DistributedValues) else leaf for leaf in leaves]
    try:
        return structure.unflatten(shape, own)
    except Exception:  # noqa: BLE001  # whatever a container raises that checks what it is given
        return value


def _type_name(kind: type) -> str:
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


def _names(value: Any) -> tuple[str, ...]:
    """Names for completion: all of them, or only the object's own where the notebook can look at the class itself."""
    try:
        names = dir(value)
        if is_importable(type(value)):
            names = sorted(set(names) - set(dir(type(value))))
    except Exception:  # noqa: BLE001
        return ()
    return tuple(name for name in names if not name.startswith("__"))


class _Brief(reprlib.Repr):
    """A container's few first members: of a state_dict, the names of tensors and their shapes."""

    def repr1(self, x: Any, level: int) -> str:
        if isinstance(x, dict) and type(x) is not dict:
            return f"{type(x).__name__}({self.repr_dict(x, level)})"
        if _is_array(x) and x.ndim:
            return f"<{type(x).__name__} {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}>"
        return super().repr1(x, level)


_BRIEF = _Brief()
_BRIEF.maxother = 80


def _short_text(value: Any) -> str:
    if isinstance(value, torch.Tensor) and dense_tensor(value) and not is_stored(value):
        return f"<{type(value).__name__}, whose storage was resized to less than it shows>"  # torch would read on
    try:
        if isinstance(value, list | tuple | dict | set | frozenset | str | bytes):
            return _BRIEF.repr(value)
        text = repr(value)
    except Exception as error:  # noqa: BLE001
        return f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"
    return _shortened(text)


def _shortened(text: str) -> str:
    return text if len(text) <= _SHORT_CHARACTERS else text[: _SHORT_CHARACTERS - 1] + "…"


def _is_array(value: Any) -> bool:
    """Whether a value is a tensor or a numpy array."""
    numpy = sys.modules.get("numpy")
    return isinstance(value, torch.Tensor) or (numpy is not None and isinstance(value, numpy.ndarray))
