"""Describing an engine's objects to the notebook: what they are, how they look, whether replicas agree on them."""

from __future__ import annotations

import contextlib
import inspect
import io
import reprlib
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from distnb.engine.objects import Space
from distnb.strategies.scope import is_apart, is_mirrored, is_read_together
from distnb.values import DistributedValues, structure
from distnb.wire.bindings import Described, Leaf, Summary
from distnb.wire.digests import is_array, is_tensor
from distnb.wire.fingerprints import Fingerprint, fingerprint
from distnb.wire.graph import GraphPickler, Side, pack_all
from distnb.wire.immutables import SCALARS, is_importable, is_plain
from distnb.wire.memory import Span, meet, span_of
from distnb.wire.messages import ObjectId
from distnb.wire.twins import is_value_twin

__all__ = ["Describer", "own_part", "summarise"]

_SHORT_ELEMENTS = 64
_SHORT_CHARACTERS = 400


class Describer:
    """Describes objects of one engine.

    Args:
        side: This process.
    """

    def __init__(self, side: Side) -> None:
        self._side = side
        self._looked_at: dict[ObjectId, Fingerprint] = {}
        self._coming: dict[ObjectId, tuple[Any, Span | None]] = {}

    def register(self, value: Any, space: Space, identity: ObjectId) -> None:
        """Give a value an id, if it is an object with one."""
        if isinstance(value, types.ModuleType) or is_plain(value):
            return
        # Under this id in any case, should the replicas not agree on which object it is.
        space.twins.add(identity, value, findable=not _may_be_code(value))
        space.registered.add(identity[1])

    def value(self, value: Any, space: Space, identity: ObjectId, *, brief: bool = False) -> Described:
        """Describe what a name or a result is. A new object is registered under `identity`."""
        if isinstance(value, types.ModuleType):
            return Described("module", value=value.__name__)
        if is_plain(value):
            return self._plain(value, space)
        self.register(value, space, identity)
        known = space.twins.id_of(value)
        if known is not None and is_value_twin(known):
            return Described("known", identity=known)
        if known is None:
            described = self._code(value, space)
            if described is not None:
                return described
            space.twins.add(identity, value)
            known = identity
        return self.object(value, space, known, "object" if known == identity else "known", brief=brief)

    def _plain(self, value: Any, space: Space) -> Described:
        if type(value) in (bool, int, float, str, type(None)):
            packed = value
            digest = f"{type(value).__name__}:{value!r}".encode()
        else:
            file = io.BytesIO()
            packed = pack_all(GraphPickler(file, self._side, space.twins.ids), file, [value])
            digest = fingerprint(value, self._side, space.twins, by_reference="all").digest
        return Described("plain", digest, packed)

    def _code(self, value: Any, space: Space) -> Described | None:
        try:
            digest = fingerprint(value, self._side, space.twins, by_reference="all").digest
        except Exception:  # noqa: BLE001
            return None  # a compiled or wrapped function that only this process can hold
        return Described("code", digest)

    def object(
        self, value: Any, space: Space, identity: ObjectId, kind: Any = "object", *, brief: bool = False
    ) -> Described:
        """Describe an object that stays on the engine, behind a handle."""
        mirrored, together = is_mirrored(value), is_read_together(value)
        wrapped = isinstance(value, DistributedValues)
        # The content of a distributed value is not asked for: looking at it would wait for the device.
        compared = not (mirrored or wrapped or is_apart(value))
        found: Fingerprint | None = None
        with contextlib.suppress(Exception):  # many objects cannot be pickled: then nothing is known of them
            found = fingerprint(value, self._side, space.twins, contents=compared, neighbours=True, keep_memo=True)
            self._looked_at[identity] = found
        return Described(
            kind,
            found.digest if compared and found is not None else None,
            identity=identity,
            # This replica's part is not what it is: that is asked for when it is shown.
            summary=summarise(value, brief=brief or together),
            mirrored=mirrored,
            together=together,
            wrapped=wrapped,
            reads=None if found is None or found.dynamic else tuple(sorted(found.names)),
            holds=() if found is None else self._holds(identity, found),
        )

    def expect(self, coming: Mapping[ObjectId, Any]) -> None:
        """Objects that will have twins once the notebook has taken them in, by their future ids."""
        self._coming = {identity: (obj, span_of(obj)) for identity, obj in coming.items()}

    def completed(self, described: dict[Any, Described]) -> dict[Any, Described]:
        """Descriptions of this program, with those among the expected objects that theirs hold."""
        if not self._coming:
            return described
        return {key: self._complete(one) for key, one in described.items()}

    def _complete(self, described: Described) -> Described:
        identity = described.identity
        found = self._looked_at.get(identity) if identity is not None else None
        if found is None or described.kind not in ("object", "known"):
            return described
        return replace(described, holds=tuple(dict.fromkeys((*described.holds, *self._held_by(found)))))

    def _holds(self, identity: ObjectId, found: Fingerprint) -> tuple[ObjectId, ...]:
        held = dict.fromkeys((*found.nodes, *found.neighbours, *self._held_by(found)))
        return tuple(each for each in held if each != identity)

    def _held_by(self, found: Fingerprint) -> list[ObjectId]:
        """The expected objects that another holds, or that lie in its memory."""
        return [
            identity
            for identity, (obj, span) in self._coming.items()
            if id(obj) in (found.memo or ()) or any(meet(span, each) for each in found.memories)
        ]

    def ended(self) -> None:
        """The program's effects are described: nothing is held on to."""
        self._looked_at.clear()
        self._coming = {}

    def items(self, values: list[Any], space: Space, serial: int) -> list[Leaf]:
        """The items of a container, each a leaf whatever it is."""
        return [Leaf(self.value(item, space, (serial, f"r{index}"))) for index, item in enumerate(values)]

    def tree(self, value: Any, space: Space, serial: int) -> Any:
        """A result's structure with a `Leaf` for each of its leaves."""
        if type(value) in SCALARS:
            return Leaf(Described("plain", None, value))
        leaves, shape = structure.flatten(value)
        described = [
            Leaf(self.value(leaf, space, (serial, f"r{index}"), brief=True)) for index, leaf in enumerate(leaves)
        ]
        if len(leaves) == 1 and leaves[0] is value:
            return described[0]
        try:
            return structure.unflatten(shape, described)
        except Exception:  # a container that checks what it is given  # noqa: BLE001
            return Leaf(self.value(value, space, (serial, "r"), brief=True))


def _may_be_code(value: Any) -> bool:
    return isinstance(value, type | types.FunctionType)


def summarise(value: Any, *, brief: bool = False) -> Summary:
    """A description short enough to be sent with every effect.

    Args:
        value: Any object.
        brief: Nothing that costs time or waits for a device; the notebook asks again when it is shown.
    """
    shown = own_part(value)
    name = _type_name(type(shown))
    if is_array(shown) or is_tensor(shown) or _is_variable(shown):
        shape, dtype = str(tuple(shown.shape)), str(shown.dtype).removeprefix("torch.")
        text = None if brief or shown.nbytes > _SHORT_ELEMENTS * 16 else _short_text(shown)
        return Summary(name, text, shape, dtype, str(getattr(shown, "device", "cpu")), kind="tensor")
    if brief:
        return Summary(name, None, iterates=isinstance(shown, Iterator))
    return Summary(
        name,
        _short_text(shown),
        attributes=_names(shown),
        doc=inspect.getdoc(shown) or "",
        signature=_signature(shown),
        kind="callable" if callable(shown) else "",
        iterates=isinstance(shown, Iterator),
    )


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
        if (is_tensor(x) or is_array(x)) and x.ndim:
            return f"<{type(x).__name__} {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}>"
        return super().repr1(x, level)


_BRIEF = _Brief()
_BRIEF.maxother = 80


def _short_text(value: Any) -> str:
    try:
        if isinstance(value, list | tuple | dict | set | frozenset | str | bytes):
            return _BRIEF.repr(value)
        text = repr(value)
    except Exception as error:  # noqa: BLE001
        return f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"
    return text if len(text) <= _SHORT_CHARACTERS else text[: _SHORT_CHARACTERS - 1] + "…"


def _signature(value: Any) -> str:
    if not callable(value):
        return ""
    try:
        target = value.forward if hasattr(value, "forward") else value
        return str(inspect.signature(target))
    except (TypeError, ValueError):
        return ""
