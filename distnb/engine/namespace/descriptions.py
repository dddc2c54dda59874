"""Descriptions of an engine's objects for the notebook, by kind and by a digest that shows whether replicas agree."""

from __future__ import annotations

import functools
import itertools
import re
import reprlib
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch

from distnb.compat.torch_internals import original_class
from distnb.engine.namespace.engine_objects import EngineObjects
from distnb.engine.namespace.surveys import ContentSurveyor, DataSurveyor
from distnb.errors import CannotTravelError
from distnb.objects.code.definitions import is_code
from distnb.objects.digesting import Digests
from distnb.objects.keras_archives import is_archived
from distnb.objects.memory.blocks import dense_tensor, is_stored
from distnb.objects.plain import SCALARS, is_importable, is_plain
from distnb.runtime.scopes.divided_objects import is_divided
from distnb.runtime.scopes.mirrored_objects import is_apart, is_mirrored, is_read_together, read_together
from distnb.values import DistributedValues, PerReplica, structure
from distnb.wire.described_values import (
    RETURNED,
    WRAPPED,
    Described,
    DescribedObject,
    Leaf,
    ModuleValue,
    PlainValue,
    SentValue,
    Sharing,
    Summary,
    TrackedValue,
    leaf_name,
)
from distnb.wire.messages import ObjectId

__all__ = ["Describer", "own_part", "summarise"]

_SHORT_ELEMENTS = 64
_SHORT_CHARACTERS = 400


class Describer:
    """The describer of the values that a program assigned or returned on one engine.

    Args:
        serial: The serial number of the program's snapshot, from which new ids are made.
        most_nbytes: The size in bytes above which data stays here.

    Attributes:
        plain: Immutable values that are not scalars, by path.
        sent: Data and code that are sent by value, by path.
        digests: The digests, and what was found while they were computed.
        fresh: The objects that stay here although sent values refer to them.
    """

    def __init__(self, objects: EngineObjects, serial: int, most_nbytes: int) -> None:
        self._objects = objects
        self._serial = serial
        self._most_nbytes = most_nbytes
        self.plain: dict[str, Any] = {}
        self.sent: dict[str, Any] = {}
        self.digests = Digests()
        self.fresh: dict[ObjectId, DescribedObject] = {}
        self._described: dict[
            str, SentValue | TrackedValue | DescribedObject
        ] = {}  # the findings of the surveys, by path
        self._paths: dict[int, str] = {}  # the paths of surveyed values, by `id()`
        objects.references.forget_program()

    @functools.cached_property
    def surveyor(self) -> DataSurveyor:
        """The surveyor of this program's data, created for the first value."""
        return DataSurveyor(self._objects, self._serial, self._most_nbytes)

    def register(self, values: Mapping[str, Any]) -> None:
        """Choose which of the assigned values are sent, and give an id to each.

        Args:
            values: The assigned values, by path.
        """
        objects, data = self._objects, dict[str, Any]()
        for path, value in values.items():
            if issubclass(type(value), types.ModuleType) or is_plain(value):
                continue
            if objects.id_of(value) is not None or objects.references.stays(value):
                objects.own((self._serial, path), value)  # before the survey of data that holds it
            else:
                data[path] = value
        for path, value in data.items():
            twin = self._paths.setdefault(id(value), path)
            described = self._survey(value, path) if twin == path else self._described[twin]
            self._described[path] = described
            if isinstance(described, SentValue):
                self.sent[path] = value
                self.digests.by_name[path] = described.kept.digest or b""
            objects.own((self._serial, path), value, by_value=not isinstance(described, DescribedObject))

    def _survey(self, value: Any, path: str) -> SentValue | TrackedValue | DescribedObject:
        """Describe data before it is sent, or as an object if it stays."""
        objects, surveyor, identity = self._objects, self.surveyor, (self._serial, path)
        number = objects.tracker.number_of(value)
        digests = Digests(by_name={name: digest for name, digest in self.digests.by_name.items() if name[:1] == "%"})
        objects.tracker.digest({path: value}, digests, lambda: surveyor)
        code, nbytes, own_id = is_code(value), surveyor.nbytes.get(path, 0), objects.id_of(value)
        if not digests.refused and own_id is None and (code or nbytes <= self._most_nbytes):
            self.digests.by_name |= digests.by_name
            self.digests.unordered |= digests.unordered
            self.digests.classes |= digests.classes
            self.digests.large |= digests.large
            kept = DescribedObject(
                identity=identity,
                digest=digests.by_name[path],
                summary=summarise(value, brief=True),
                reads=tuple(sorted(digests.names)),
                holds=surveyor.held[path],
            )
            return SentValue(kept, number)
        described = DescribedObject(identity=identity)
        if path in surveyor.errors:
            if number is not None:
                return TrackedValue(number)
            error = surveyor.errors[path]
            reason = str(error) if isinstance(error, CannotTravelError) else f"{type(error).__name__}: {error}"
            described = described._replace(why=f"it cannot be pickled ({reason})")
        elif own_id is not None:  # it cannot be pickled, or is an instance that holds a device object
            described = described._replace(why=surveyor.reasons.get(own_id, ""))
        elif path not in surveyor.made:
            reads, holds = tuple(sorted(digests.names)), surveyor.held[path]
            described = described._replace(digest=digests.by_name[path], reads=reads, holds=holds, nbytes=nbytes)
        else:
            described = described._replace(nbytes=nbytes)
        for name in digests.by_name.keys() - self.digests.by_name.keys():
            surveyor.drop(name)
        return described

    def content_digest(self, value: Any) -> bytes | None:
        """Return the digest of a value including its tensors, or None if it cannot be pickled."""
        return ContentSurveyor(self._objects, value, tensors=True).digest_of_root()

    def note_held(self, held: Mapping[str, set[str]]) -> None:
        """Note which other names' objects the packed values hold.

        Args:
            held: These names, by the path of the value that holds them.
        """
        for path, names in held.items():
            described = self._described.get(path)
            if isinstance(described, SentValue):
                kept = described.kept
                self._described[path] = SentValue(
                    kept._replace(holds=tuple({*kept.holds, *names} - {path})), described.number
                )

    def value(self, value: Any, path: str, *, brief: bool = False) -> Described:
        """Describe the value of a name, or a result. A new object is kept under `path`."""
        kind = type(value)
        if issubclass(kind, types.ModuleType):
            known = self._objects.id_of(value)
            identity = known if known is not None else self._objects.own((self._serial, path), value)
            return ModuleValue(value.__name__, identity)
        if kind in SCALARS or (kind is str and len(value) < _SHORT_CHARACTERS):
            return PlainValue(value)
        if kind is not PerReplica and is_plain(value):
            self.plain[path] = value
            return PlainValue(packed=True)
        described = self._described.get(path)
        if isinstance(described, SentValue):
            return SentValue(described.kept._replace(identity=(self._serial, path)), described.number)
        tracker = self._objects.tracker
        number = tracker.number_of(value)
        if number is not None and self._objects.id_of(value) is None:
            return TrackedValue(number)
        return self.object(value, self._objects.own((self._serial, path), value), brief=brief, surveyed=path)

    def object(self, value: Any, identity: ObjectId, *, brief: bool = False, surveyed: str = "") -> DescribedObject:
        """Describe an object that stays on the engine, behind a handle.

        If an object cannot be described, its summary gives the reason, so that the others can still be described.

        Args:
            surveyed: The path under which the object was surveyed; "" if it was not.
        """
        try:
            return self._object(value, identity, brief=brief, surveyed=surveyed)
        except Exception as error:  # whatever a user's class or a rare kind of tensor raises  # noqa: BLE001
            text = f"<{type(value).__name__} that cannot be described: {type(error).__name__}: {error}>"
            summary = Summary(type=_type_name(type(value)), text=_shortened(text))
            return DescribedObject(identity=identity, summary=summary)

    def _object(self, value: Any, identity: ObjectId, *, brief: bool, surveyed: str) -> DescribedObject:
        if type(value) is PerReplica and surveyed not in self._described:  # such as each leaf of each batch
            return DescribedObject(identity=identity, summary=summarise(value, brief=brief), sharing=WRAPPED)
        mirrored, together = is_mirrored(value), is_read_together(value)
        wrapped = isinstance(value, DistributedValues)
        # The content of a distributed value is not read, since that would wait for the device.
        compared = not (mirrored or wrapped or is_apart(value))
        # All replicas together read the value of some objects. Such a value is read when it is shown.
        summary = summarise(value, brief=brief or together)
        if summary.number is not None and not wrapped:
            return self._number(value, identity, summary)
        known = self._described.get(surveyed)
        if not isinstance(known, DescribedObject):
            known = DescribedObject(identity=identity)
        if known.digest is not None:
            return known._replace(identity=identity, summary=summary)
        divided = together and is_divided(value)
        # Keras would gather the shards of its objects for their pickles, and replicas may survey different objects.
        unread = wrapped or (divided and is_archived(type(value)))
        survey = None if unread else ContentSurveyor(self._objects, value, tensors=compared)
        digest = survey.digest_of_root() if survey is not None else None
        return DescribedObject(
            identity=identity,
            digest=digest if compared else None,
            summary=summary,
            sharing=Sharing(mirrored=mirrored, wrapped=wrapped, together=together, divided=divided),
            reads=tuple(sorted(survey.seen.names)) if survey is not None else (),
            holds=survey.holds() if survey is not None else (),
            why=known.why or (self.surveyor.reasons.get(identity, "") if "surveyor" in vars(self) else ""),
            nbytes=known.nbytes,
        )

    def _number(self, value: Any, identity: ObjectId, summary: Summary) -> DescribedObject:
        """Describe a tensor of one number, such as a step's loss, without pickling it."""
        tracker = self._objects.tracker
        number = tracker.number_of_memory(value.data_ptr(), 1)
        holds = () if number is None else (tracker.name_of(number),)
        digest = f"{summary.dtype} {summary.number!r} {summary.graph}".encode()
        return DescribedObject(identity=identity, digest=digest, summary=summary, holds=holds)

    def register_fresh(self, value: Any) -> ObjectId:
        """Give an id to an object that stays, if sent data refers to it and no survey has found it."""
        made = self.surveyor.made.setdefault("", {})
        identity = self._objects.own((self._serial, f"*{len(made)}"), value)
        made[identity] = value
        return identity

    def describe_fresh(self) -> None:
        """Describe the objects within sent data that got an id, for the notebook's handles."""
        for made in self.surveyor.made.values():
            for identity, value in made.items():
                self.fresh[identity] = self.object(value, identity, brief=True)

    def tree(self, value: Any) -> Any:
        """Return the structure of a result, with a `Leaf` for each of its leaves."""
        if type(value) in SCALARS:
            return Leaf(PlainValue(value))
        try:
            leaves, shape = structure.flatten(value)
        except Exception:  # the container holds itself, or its class raises any error  # noqa: BLE001
            return Leaf(self.value(value, RETURNED, brief=True))
        if len(leaves) == 1 and leaves[0] is value:
            return Leaf(self.value(value, RETURNED, brief=True))
        described = [
            Leaf(self.value(leaf, leaf_name(RETURNED, index), brief=True)) for index, leaf in enumerate(leaves)
        ]
        try:
            return structure.unflatten(shape, described)
        except Exception:  # the container's class checks its items, and refuses a `Leaf`  # noqa: BLE001
            return Leaf(self.value(value, RETURNED, brief=True))


def summarise_read(value: Any) -> Summary:
    """Return the summary of the combination of all replicas' parts. Replicas call this together.

    A large object of which they hold shards is not gathered for that.
    """
    if is_divided(value) and not (isinstance(value, torch.Tensor) and _nbytes(value) <= _SHORT_ELEMENTS * 16):
        return summarise(value)
    return summarise(value, brief=True)._replace(text=summarise(read_together(value)).text)


def summarise(value: Any, *, brief: bool = False) -> Summary:
    """Return a description that is short enough to be sent with every result.

    A brief summary leaves out what costs time or waits for a device. The notebook requests the rest when it shows the
    object.
    """
    shown = own_part(value)
    name = _type_name(original_class(shown))
    if _is_array(shown) or _is_variable(shown):
        shape, dtype = _shape_text(shown), str(shown.dtype).removeprefix("torch.")
        text = None if brief or _nbytes(shown) > _SHORT_ELEMENTS * 16 else _short_text(shown)
        graph = name == "torch.Tensor" and shown.grad_fn is not None
        at_hand = name == "torch.Tensor" and shape == "()" and shown.is_cpu and (graph or not shown.requires_grad)
        number = shown.item() if at_hand and dense_tensor(shown) and is_stored(shown) else None
        return Summary(
            type=name,
            text=text,
            shape=shape,
            dtype=dtype,
            device=str(getattr(shown, "device", "cpu")),
            number=number,
            graph=graph,
            hashing=_hashing(shown),
        )
    iterates, hashing = isinstance(shown, Iterator), _hashing(shown)
    if brief:
        return Summary(type=name, text=None, iterates=iterates, hashing=hashing)
    return Summary(type=name, text=_short_text(shown), attributes=_names(shown), iterates=iterates, hashing=hashing)


def _hashing(value: Any) -> Literal["identity", "value", "none"]:
    method: Any = type(value).__hash__
    if method is None:
        return "none"
    return "identity" if method is object.__hash__ or isinstance(value, torch.Tensor) else "value"


def _shape_text(array: Any) -> str:
    """Return an array's shape as text; "" for a nested tensor, whose rows differ in length."""
    try:
        return str(tuple(array.shape))
    except RuntimeError:  # raised by a nested tensor
        return ""


def _nbytes(array: Any) -> int:
    """Return an array's size in bytes. A sparse tensor has no `nbytes`, and gets the size of an equal dense one."""
    size = array.numel() * array.element_size() if isinstance(array, torch.Tensor) else array.nbytes
    return int(size)


def _is_variable(value: Any) -> bool:
    variables = sys.modules.get("distnb.variables.variable")
    return variables is not None and isinstance(value, variables.Variable)


def own_part(value: Any) -> Any:
    """Return a value, or a structure of distributed values, with this replica's own components.

    A structure that cannot be flattened or rebuilt, such as one that contains itself or whose class raises, is returned
    unchanged, since a description must not fail.
    """
    if type(value) is PerReplica:
        return value.values[0]
    try:
        if not structure.has_distributed(value):
            return value
        leaves, shape = structure.flatten(value)
    except Exception:  # noqa: BLE001  # RecursionError, and whatever a container raises when it is iterated
        return value
    own = [leaf.values[0] if isinstance(leaf, DistributedValues) else leaf for leaf in leaves]
    try:
        return structure.unflatten(shape, own)
    except Exception:  # noqa: BLE001  # whatever a container raises that checks its items
        return value


def _type_name(kind: type) -> str:
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


def _names(value: Any) -> tuple[str, ...]:
    """Return the names for completion: all of them, or only the object's own if the notebook has its class, too."""
    try:
        names = dir(value)
        if is_importable(type(value)):
            names = sorted(set(names) - set(dir(type(value))))
    except Exception:  # noqa: BLE001
        return ()
    return tuple(name for name in names if not name.startswith("__"))


class _Brief(reprlib.Repr):
    """A repr of a container's first members, such as the names and shapes of a state_dict's tensors.

    Members are not sorted if they may be tensors: comparing shards would be a message to the other replicas.
    """

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        if not x or level <= 0:
            return "{...}" if x else "{}"
        items = itertools.islice(x.items(), self.maxdict)
        texts = [f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}" for key, value in items]
        if len(x) > self.maxdict:
            texts.append("...")
        return f"{{{', '.join(texts)}}}"

    def repr_set(self, x: set[Any], level: int) -> str:
        if any(isinstance(member, torch.Tensor) for member in x):
            return f"{{{self.repr1(list(x), level)[1:-1]}}}"
        return super().repr_set(x, level)

    def repr1(self, x: Any, level: int) -> str:
        if isinstance(x, dict) and type(x) is not dict:
            return f"{type(x).__name__}({self.repr_dict(x, level)})"
        if _is_array(x) and x.ndim:
            return f"<{type(x).__name__} {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}>"
        return super().repr1(x, level)


_OF_FSDP = re.compile(r"\bFSDP(?=\w+\()")
_BRIEF = _Brief()
_BRIEF.maxother = 80


def _short_text(value: Any) -> str:
    if isinstance(value, torch.Tensor) and dense_tensor(value) and not is_stored(value):
        return f"<{type(value).__name__} whose storage is smaller than its shape>"  # torch would read past its end
    try:
        if isinstance(value, list | tuple | dict | set | frozenset | str | bytes):
            return _BRIEF.repr(value)
        text = repr(value)
        if original_class(value) is not type(value):
            text = _OF_FSDP.sub("", text)
    except Exception as error:  # noqa: BLE001
        return f"<{type(value).__name__} whose repr raised {type(error).__name__}>"
    return _shortened(text)


def _shortened(text: str) -> str:
    return text if len(text) <= _SHORT_CHARACTERS else text[: _SHORT_CHARACTERS - 1] + "…"


def _is_array(value: Any) -> bool:
    """Return whether a value is a tensor or a numpy array."""
    numpy = sys.modules.get("numpy")
    return isinstance(value, torch.Tensor) or (numpy is not None and isinstance(value, numpy.ndarray))
