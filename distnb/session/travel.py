"""Making deliveries: of what a program needs that which the engines do not have yet, and all that they must hear of."""

from __future__ import annotations

import io
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from distnb.session.cell_names import cell_name
from distnb.session.handles import HANDLES, state_of_handle
from distnb.session.luggage import Luggage, Root, is_simple_code, shape_of, tuples_of_call
from distnb.session.modules import ModuleWatch
from distnb.session.spaces import NotebookSpace
from distnb.wire.bindings import Delivery, Reloads, pack_indexes
from distnb.wire.codec import Parcel
from distnb.wire.digests import is_array, is_tensor
from distnb.wire.environment import capture_environment, with_fresh_seed
from distnb.wire.frozen import hide_outdated, note_frozen
from distnb.wire.graph import GraphPickler, Side
from distnb.wire.memory import covers, extent, is_buffer, start_of
from distnb.wire.messages import ObjectId
from distnb.wire.nodes import FROZEN, is_node, state_of, without_passing
from distnb.wire.twins import NOT_THERE, is_value_twin, sent_id
from distnb.wire.views import carrier_among

__all__ = ["Packer"]

LARGE_NBYTES = 50 << 20
_HELD_BY_US = 3  # the memo's entry, the loop's variable, and getrefcount's argument


class Packer:
    """Makes one delivery for one space.

    Args:
        space: Whose engines it is for.
        side: This process.
        serial: The delivery's number.
        modules: Sees reloads of local modules.
        announce: Told of large objects.
        luggage: What the program needs; it may still grow.
        in_call: The program is a call, and must be fast: only what can change is compared after it.
    """

    def __init__(
        self,
        space: NotebookSpace,
        side: Side,
        serial: int,
        modules: ModuleWatch,
        announce: Callable[[str], None],
        luggage: Luggage,
        *,
        in_call: bool = False,
    ) -> None:
        self._space = space
        self._side = side
        self._serial = serial
        self._modules = modules
        self._announce = announce
        self._in_call = in_call
        self._rules = space.rules
        self.luggage = luggage

    def local_modules(self) -> list[types.ModuleType]:
        """The local modules that are loaded in the notebook: any of them may be reloaded."""
        return self._modules.local()

    def pack(self, arguments: Any = None, *, delete: Iterable[str] = ()) -> Delivery:
        """Make the delivery, and note what the engines have from now on."""
        space, luggage = self._space, self.luggage
        contents = {key: digest for root in luggage.roots for key, digest in root.found.arrays.items()}
        dirty = self._dirty()
        file = io.BytesIO()
        pickler = GraphPickler(file, self._side, space.twins.ids, self._rules)
        pickler.roots = self._memories_on_the_way()
        pickler.carriers = [owner for root in luggage.roots for owner in root.found.owners]
        pickler.carriers += [root.value for root in luggage.roots if is_buffer(root.value)]
        pickler.neighbours = space.twins.neighbours
        pickler.dump(luggage.bindings)
        pickler.dump(arguments)
        sent: set[ObjectId] = set()
        for identity in dirty:
            node = space.twins.get(identity)
            if node is NOT_THERE or (id(node) in contents and space.twins.contents.get(identity) == contents[id(node)]):
                continue
            kind, state = state_of(node)
            if kind == FROZEN:
                continue
            pickler.dump((identity, kind, state))
            sent.add(identity)
        nodes = self._register(pickler, {id(luggage.bindings), *luggage.made, *tuples_of_call(arguments)})
        blob = Parcel([file.getbuffer(), *pickler.buffers])
        self._note(contents, sent)
        self._tell_of_large(blob.nbytes)
        modules = (
            self._modules.wanted(
                [value for value in luggage.bindings.values() if isinstance(value, types.ModuleType)],
                luggage.attributes,
            )
            if luggage.bindings or not self._in_call
            else {}
        )
        sources = {name: (text, cell_name(name)) for name, text in luggage.sources.items() if name not in space.sources}
        space.sources.update(sources)
        modules = {name: reloads for name, reloads in modules.items() if space.modules.get(name) != reloads}
        space.modules.update(modules)
        return self.deliver(blob, len(sent), pack_indexes(nodes), tuple(delete), sources, modules)

    def deliver(
        self,
        blob: Parcel,
        updates: int = 0,
        nodes: bytes = b"",
        delete: tuple[str, ...] = (),
        sources: dict[str, tuple[str, str]] | None = None,
        modules: dict[str, Reloads] | None = None,
    ) -> Delivery:
        """Make the delivery of what was packed, with all that the engines must hear of besides."""
        space = self._space
        environment = capture_environment()
        changed = environment.since(space.environment)
        space.environment = environment
        if changed.generators is not None:
            changed = replace(changed, generators=with_fresh_seed(changed.generators))
        delivery = Delivery(
            space.key,
            self._serial,
            blob,
            updates,
            nodes,
            delete,
            tuple(space.confirmed),
            tuple(space.rejected),
            dict(space.renamed),
            self._release() if space.twins.released else (),
            tuple(self.watched(self.luggage.roots)),
            tuple(self._compared_handles()),
            None if changed.empty else changed,
            sources or {},
            modules or {},
        )
        space.confirmed.clear()
        space.rejected.clear()
        space.renamed.clear()
        return delivery

    def _release(self) -> tuple[ObjectId, ...]:
        released = self._space.twins.take_released()
        for identity in released:
            self._space.records.pop(identity, None)
            self._space.shapes.pop(identity, None)
        return released

    def _dirty(self) -> dict[ObjectId, None]:
        """Objects there whose state may be out of date; the others are forgotten, to be sent anew."""
        twins = self._space.twins
        dirty: dict[ObjectId, None] = {}
        replaced = self._reattached()
        grew = True
        while grew:
            grew = False
            for root in self.luggage.roots:
                if not root.changed and not replaced.isdisjoint(root.found.nodes):
                    root.changed = grew = True
            for root in self.luggage.roots:
                for identity in root.found.nodes if root.changed else ():
                    if identity not in dirty:
                        dirty[identity] = None
                        if self._has_other_shape(identity):
                            replaced.add(identity)
                            twins.hide(identity)
                            grew = True
            outdated = hide_outdated(dirty.keys() - replaced, self._side, twins, self._rules)
            replaced.update(outdated)
            grew = grew or bool(outdated)
        twins.drop(replaced)
        twins.released.extend(replaced)
        return {identity: None for identity in dirty if identity not in replaced}

    def _reattached(self) -> set[ObjectId]:
        """Views that are there in a memory of their own, and whose whole now travels: they are sent again, as views."""
        twins = self._space.twins
        found: set[ObjectId] = set()
        for whole in [root.value for root in self.luggage.roots if twins.id_of(root.value) is None]:
            parts = {identity: part for identity, part in twins.neighbours(whole) if is_value_twin(identity)}
            if parts and (is_buffer(whole) or carrier_among(list(parts.values()), whole) is None):
                found |= {
                    identity for identity, part in parts.items() if not is_buffer(part) and covers(whole, extent(part))
                }
        for identity in found:
            twins.hide(identity)
        return found

    def _memories_on_the_way(self) -> set[int]:
        """The `id()` of what is sent, and the addresses of the storages of the tensors among it."""
        values = [root.value for root in self.luggage.roots]
        return {*map(id, values), *(start_of(value) for value in values if is_tensor(value))}

    def _has_other_shape(self, identity: ObjectId) -> bool:
        node = self._space.twins.get(identity)
        if not is_array(node) and not is_tensor(node):
            return False
        return bool(self._space.shapes.get(identity, shape_of(node)) != shape_of(node))

    def _register(self, pickler: GraphPickler, skip: set[int]) -> list[int]:
        twins = self._space.twins
        memo = pickler.memo.copy()
        pickler.clear_memo()
        pickler._storages.clear()
        nodes = [(index, obj) for index, obj in memo.values() if is_node(obj) and id(obj) not in twins.ids]
        del memo
        for _, obj in nodes:
            # The attributes of an instance are its own affair.
            attributes = getattr(obj, "__dict__", None)
            if type(attributes) is dict:
                skip.add(id(attributes))
        obj = None
        kept = []
        for index, obj in without_passing(nodes):
            if sys.getrefcount(obj) > _HELD_BY_US and id(obj) not in skip and not isinstance(obj, HANDLES):
                twins.add(sent_id(self._serial, index), obj)
                kept.append(index)
        return kept

    def _note(self, contents: dict[int, bytes], sent: set[ObjectId]) -> None:
        """Remember what the engines have."""
        space = self._space
        if sent:
            # What else holds one of these is not there any more as it was when it was sent.
            for key in [key for key, record in space.records.items() if not sent.isdisjoint(record.nodes)]:
                if not any(root.key == key for root in self.luggage.roots):
                    del space.records[key]
        for root in self.luggage.roots:
            identity = space.twins.id_of(root.value)
            if identity is not None:
                root.key = identity
            if root.changed:
                space.records[root.key] = root.found.settled(space.twins)
        for root in self.luggage.roots:
            if not root.changed:
                continue
            for identity in space.records[root.key].nodes:
                node = space.twins.get(identity)
                if id(node) in contents:
                    space.twins.contents[identity] = contents[id(node)]
                    space.shapes[identity] = shape_of(node)
            note_frozen(space.records[root.key].nodes, self._side, space.twins, self._rules)
        for name, value in self.luggage.bindings.items():
            space.mark_bound(name, value)

    def _tell_of_large(self, nbytes: int) -> None:
        if nbytes < LARGE_NBYTES:
            return
        large = [
            f"{root.label} ({root.found.nbytes / 1e6:,.0f} MB)"
            for root in self.luggage.roots
            if root.changed and root.found.nbytes > LARGE_NBYTES // 4
        ]
        self._announce(
            f"distnb: sending {nbytes / 1e6:,.0f} MB to {self._space.size} replica(s): "
            f"{', '.join(large) or 'many objects'}"
        )

    def watched(self, roots: Iterable[Root]) -> Iterable[ObjectId]:
        """Objects in some roots that the program may change in place, and those known to be such."""
        watched = dict(self.luggage.watch)
        for root in roots:
            if self._in_call and is_simple_code(root.value):
                continue
            identity = self._space.twins.id_of(root.value)
            if identity is not None:
                watched[identity] = None
            else:  # a tuple, or another value without an identity: look at the objects in it
                watched.update(
                    dict.fromkeys(self._space.records[root.key].nodes if root.key in self._space.records else ())
                )
        return watched

    def _compared_handles(self) -> Iterable[ObjectId]:
        """Engine objects to be described anew. In a call only those that were found equal."""
        if not self._in_call:
            return self.luggage.handles
        found = []
        for identity in self.luggage.handles:
            handle = self._space.twins.get(identity)
            if isinstance(handle, HANDLES) and any(
                fact.digest is not None for fact in state_of_handle(handle).facts.values()
            ):
                found.append(identity)
        return found
