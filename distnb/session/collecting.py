"""What of the notebook's namespace a program needs: the names that it reads, and what they lead to."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Set
from typing import Any

from distnb.errors import CannotTravelError, StaleHandleError
from distnb.session.handles import HANDLES, state_of_handle
from distnb.session.luggage import Luggage, Root
from distnb.session.refusals import explain
from distnb.session.spaces import Argument, NotebookSpace, Seeing
from distnb.session.user_names import is_user_name, user_names
from distnb.wire.fingerprints import fingerprint
from distnb.wire.graph import Side, Unsendable
from distnb.wire.immutables import is_plain
from distnb.wire.messages import ObjectId
from distnb.wire.twins import NOT_THERE, is_value_twin

__all__ = ["Collector"]


class Collector:
    """Collects the luggage of one program.

    Args:
        space: Of the engines that run it.
        user_ns: The notebook's namespace.
        side: This process.
    """

    def __init__(self, space: NotebookSpace, user_ns: dict[str, Any], side: Side) -> None:
        self._space = space
        self._user_ns = user_ns
        self._side = side
        self._rules = space.rules
        self.luggage = Luggage()
        self._seen: set[int] = set()
        self._done: set[str] = set()
        self._optional: collections.deque[str] = collections.deque()

    def collect(self, names: Iterable[str], *, optional: Iterable[str] = (), remade: Set[str] = frozenset()) -> None:
        """Take in what names are bound to, and what the functions among them read, and so on.

        Args:
            names: Names that are read; those that the notebook does not have are left out.
            optional: Names that may be read; those whose value cannot travel are left out.
            remade: Names that the program assigns. Where only a function reads one, and its object is gone, the
                function is taken to be called when the new one is there.

        Raises:
            CannotTravelError: The value of a name cannot be sent.
            StaleHandleError: It is gone.
        """
        self._optional.extend(optional)
        required = collections.deque(names)
        read_by_functions = remade - set(required)
        while required or self._optional:
            needed = bool(required)
            name = (required if needed else self._optional).popleft()
            if name in self._done or not is_user_name(name, self._user_ns):
                continue
            try:
                reads = self._take(name, self._user_ns[name])
            except (CannotTravelError, StaleHandleError) as error:
                if needed and not (isinstance(error, StaleHandleError) and name in read_by_functions):
                    raise
                continue
            self._done.add(name)
            (required if needed else self._optional).extend(reads)

    def _take(self, name: str, value: Any) -> Iterable[str]:
        if isinstance(value, HANDLES):
            reads = self._take_handle(value, name)
            self.luggage.bindings[name] = value
            return reads
        if is_plain(value):
            self.luggage.bindings[name] = value
            return ()
        reads = self.take_value(value, name)
        self.luggage.bindings[name] = value
        return reads

    def take_value(self, value: Any, name: str, label: str = "") -> set[str]:
        """Take in an object. Returns the global names that its functions read."""
        if isinstance(value, HANDLES):
            return self._take_handle(value, name)
        if id(value) in self._seen:
            return set()
        self._seen.add(id(value))
        handles: list[Any] = []
        try:
            found = fingerprint(value, self._side, self._space.twins, Seeing(self._rules, handles), keep_memo=True)
        except Exception as error:
            self._seen.discard(id(value))  # under another name it is to be refused again
            raise explain(value, label or f"`{name}`", error) from error
        identity = self._space.twins.id_of(value)
        key: ObjectId | str = identity if identity is not None else f"name:{name}"
        changed = not found.matches(self._space.records.get(key))
        self.luggage.roots.append(Root(key, label or f"`{name}`", value, found, changed))
        self.luggage.attributes |= found.attributes
        self.luggage.sources |= found.sources
        reads = set(found.names)
        if found.dynamic:
            self._optional.extend(user_names(self._user_ns))
        for handle in handles:
            reads |= self._take_handle(handle, "")
        return reads

    def take_handle(self, handle: Any) -> set[str]:
        """Take in an engine object that the program touches. Returns the global names that its code reads."""
        return self._take_handle(handle, "", in_part=True)

    def _take_handle(self, handle: Any, name: str, *, in_part: bool = False) -> set[str]:
        if isinstance(handle, Argument):
            handle = handle.handle
        if not isinstance(handle, HANDLES):
            return set()  # a distributed value made in the notebook: its components travel with it
        try:
            state = self._space.state(handle, in_part=in_part)
        except Unsendable as error:
            raise explain(handle, f"`{name}`" if name else state_of_handle(handle).label, error) from error
        if id(handle) in self._seen:
            return set()
        self._seen.add(id(handle))
        self.luggage.handles[state.identity] = None
        reads: set[str] = set()
        for fact in state.facts.values():
            reads |= set(fact.reads) if fact.reads is not None else self._space.bound.keys() & self._user_ns.keys()
            self._take_held(fact.holds)
        return reads

    def _take_held(self, identities: Iterable[ObjectId]) -> None:
        """Objects that an engine object holds: the notebook may have changed its own of them since."""
        for identity in identities:
            if not is_value_twin(identity):
                self.luggage.handles[identity] = None
                continue
            value = self._space.twins.get(identity)
            if value is not NOT_THERE and not isinstance(value, HANDLES):
                self.take_value(value, f"#{identity}")
