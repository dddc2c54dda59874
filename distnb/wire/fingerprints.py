"""Fingerprints: whether an object, with all that it holds, is what it was, here and on every replica."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import xxhash

from distnb.wire.digests import DIGEST_NBYTES, digest_of_buffers, is_array, is_tensor, mark_of_content
from distnb.wire.graph import GraphPickler, Side
from distnb.wire.memory import Span, owner_of, span_of
from distnb.wire.messages import ObjectId
from distnb.wire.twins import Twins

__all__ = ["Fingerprint", "Fingerprinter", "fingerprint"]

ByReference = Literal["nothing", "owned", "all"]

_LARGE_NBYTES = 1 << 20


@dataclass(frozen=True)
class Fingerprint:
    """What one pass over an object and all that it holds found.

    Attributes:
        digest: Of everything, the sharing within it included.
        nodes: Those of its nodes that have twins, in order.
        arrays: Marks of the content of its arrays and tensors, by `id()`.
        names, attributes, dynamic, sources: What its functions read (see `GraphPickler`).
        nbytes: Size of what it holds, about.
        memo: Every object on the way, for `settled`.
        neighbours: Objects with twins that lie in the memory of its arrays and tensors, if they were asked for.
        memories: That memory.
        owners: Arrays that own the memory of others on the way.
    """

    digest: bytes
    nodes: tuple[ObjectId, ...] = ()
    arrays: dict[int, bytes] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()
    dynamic: bool = False
    sources: dict[str, str] = field(default_factory=dict)
    nbytes: int = 0
    memo: dict[int, Any] | None = field(default=None, repr=False)
    neighbours: tuple[ObjectId, ...] = ()
    memories: frozenset[Span] = frozenset()
    owners: tuple[Any, ...] = field(default=(), repr=False)

    def settled(self, twins: Twins) -> Fingerprint:
        """The same, with the nodes that have twins by now, and without holding on to any object."""
        if self.memo is None:
            return self
        return replace(
            self, nodes=_known_nodes(self.memo, twins, self.nbytes), memo=None, arrays={}, sources={}, owners=()
        )

    def matches(self, other: Fingerprint | None) -> bool:
        """Whether nothing changed between two passes: neither the content, nor which objects hold it."""
        return other is not None and self.digest == other.digest and self.nodes == other.nodes


class Fingerprinter(GraphPickler):
    """Pickles for the digest alone.

    Args:
        ids: What stands by reference; empty for a deep fingerprint.
        contents: Look at the elements of arrays and tensors, too.
    """

    def __init__(
        self,
        file: io.BytesIO,
        side: Side,
        ids: dict[int, ObjectId],
        rules: dict[type, Callable[[Any], Any]] | None = None,
        *,
        contents: bool = True,
    ) -> None:
        super().__init__(file, side, ids, rules)
        self._contents = contents
        self.arrays: dict[int, bytes] = {}
        self.twins: Twins | None = None
        self.near: dict[ObjectId, None] = {}
        self.memories: set[Span | None] = set()
        self.owners: dict[int, Any] = {}
        self.nbytes = 0

    def reducer_override(self, obj: Any) -> Any:
        if is_array(obj) or is_tensor(obj):
            return self._mark(obj)
        return super().reducer_override(obj)

    def _mark(self, obj: Any) -> Any:
        if self.twins is not None:
            self.near.update((identity, None) for identity, _ in self.twins.neighbours(obj))
            self.memories.add(span_of(obj))
        elif is_array(obj) and obj.size:
            owner = owner_of(obj)
            if is_array(owner):
                self.owners[id(owner)] = owner
        self.nbytes += obj.nbytes
        if not self._contents:
            return bytes, (b"",)
        mark = self.arrays[id(obj)] = mark_of_content(obj)
        digest = mark[:DIGEST_NBYTES]
        parts: list[Any] = [digest]
        attributes = getattr(obj, "__dict__", None)
        if attributes:
            parts.append(dict(attributes))
        if is_tensor(obj) and obj.is_leaf and obj.grad is not None:
            parts.append(obj.grad)
        # As items, so that a tensor may stand in its own attributes.
        return (bytes, (digest,)) if len(parts) == 1 else (list, (), None, iter(parts))


def fingerprint(
    value: Any,
    side: Side,
    twins: Twins,
    rules: dict[type, Callable[[Any], Any]] | None = None,
    *,
    contents: bool = True,
    by_reference: ByReference = "nothing",
    keep_memo: bool = False,
    neighbours: bool = False,
) -> Fingerprint:
    """Take the fingerprint of a value.

    Args:
        value: Any object.
        side, twins: Of this process.
        rules: What stands by reference by its type (handles).
        contents: Look at the elements of arrays and tensors, too.
        by_reference: Which objects with twins stand for themselves, without a look inside.
        neighbours: Look for what lies in the memory of its arrays and tensors.
        keep_memo: Remember every object on the way, so that `settled` can be called when they have got twins.

    Raises:
        Unsendable, Exception: It cannot be pickled.
    """
    file = io.BytesIO()
    ids: dict[int, ObjectId] = {"nothing": {}, "owned": twins.owned, "all": twins.ids}[by_reference]
    pickler = Fingerprinter(file, side, ids, rules, contents=contents)
    if neighbours:
        pickler.twins = twins
    pickler.dump(value)
    hasher = xxhash.xxh3_128(file.getbuffer())
    for buffer in pickler.buffers:
        pickler.nbytes += memoryview(buffer).nbytes
    hasher.update(digest_of_buffers(pickler.buffers))
    with quiet_collector(file.tell()):
        memo = pickler.memo.copy() if by_reference != "all" else {}
    return Fingerprint(
        hasher.digest(),
        _known_nodes(memo, twins, file.tell()),
        pickler.arrays,
        frozenset(pickler.names),
        frozenset(pickler.attributes),
        pickler.dynamic,
        pickler.sources,
        pickler.nbytes + file.tell(),
        memo if keep_memo else None,
        tuple(pickler.near),
        frozenset(span for span in pickler.memories if span is not None),
        tuple(pickler.owners.values()),
    )


def _known_nodes(memo: dict[int, Any], twins: Twins, nbytes: int) -> tuple[ObjectId, ...]:
    ids = twins.ids
    with quiet_collector(nbytes):
        found = [(entry[0], ids[key]) for key, entry in memo.items() if key in ids]
    found.sort()
    return tuple(identity for _, identity in found)


@contextmanager
def quiet_collector(nbytes: int) -> Iterator[None]:
    """Keep the garbage collector from running again and again while many small objects are made."""
    if nbytes < _LARGE_NBYTES or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
