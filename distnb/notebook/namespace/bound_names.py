"""The bindings of names in the engines' namespace, as far as the notebook knows them."""

from __future__ import annotations

import types
import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from distnb.notebook.handles.handle import HANDLES
from distnb.notebook.namespace.user_names import is_user_name
from distnb.objects.plain import is_plain, same
from distnb.objects.tracking import Tracker
from distnb.values import Mirrored
from distnb.wire.exchange import Bindings

if TYPE_CHECKING:
    from distnb.notebook.namespace.needs import Needs

__all__ = ["BoundNames"]

_UNKNOWN: Any = object()


class BoundNames:
    """The bindings of names on the engines of one group.

    A program binds the names that it reads. The notebook's other names stay bound on the engines, since threads of
    earlier cells may read them. Immutable values, modules and handles are updated to the current ones. Values that are
    sent by value stay as they were. The bindings do not keep objects behind handles alive.

    Args:
        tracker: The tracker of the values that are sent by value.

    Attributes:
        latest: The names that the latest snapshot bound, if nothing was bound since; else None.
        earlier: Names that were bound before the bindings were last forgotten.

    An example: cell 1 starts a thread that reads `rate`, `rows` and `done`. Then the notebook executes `rate = 0.1`,
    `rows = []` and `del done`. Cell 2, which reads none of these names, begins. From then on the thread finds the new
    rate, the old list of `rows`, and no `done`.
    """

    def __init__(self, tracker: Tracker) -> None:
        self.latest: tuple[str, ...] | None = None
        self.earlier: set[str] = set()
        self._tracker = tracker
        self._values: dict[str, Any] = {}  # immutable values, modules, and weak references to handles
        self._sent: set[str] = set()  # names whose immutable values and handles the engines keep
        self._there: set[str] = set()  # every name that is bound

    def clear(self) -> None:
        """Forget all bindings, since an engine may have other values."""
        self.latest = None
        self.earlier |= self._there
        self._values.clear()
        self._sent.clear()
        self._there.clear()

    def send(self, name: str, value: Any) -> None:
        """Note that an immutable value, a handle or a module is sent for a name, and that the engines keep it."""
        self.assign(name, value)
        self._sent.add(name)

    def assign(self, name: str, value: Any) -> None:
        """Note that a name is bound on the engines to the same value as in the notebook."""
        self._sent.discard(name)
        self._there.add(name)
        if not _is_small(value):
            self._values.pop(name, None)
        else:
            self._values[name] = weakref.ref(value) if type(value) in HANDLES else value

    def send_by_value(self, names: Iterable[str]) -> None:
        """Note that from now on the tracker knows the engines' values of these names."""
        for name in names:
            self._values.pop(name, None)
            self._sent.discard(name)
        self._there.update(names)

    def forget_sent_handles(self) -> None:
        """Forget which handles were sent, since handles now represent other objects."""
        self._sent = {name for name in self._sent if type(self._values[name]) is not weakref.ref}

    def is_sent(self, name: str, value: Any) -> bool:
        """Return whether the engines keep an immutable value or a handle for a name."""
        return name in self._sent and self._is_bound_to(name, value)

    def rebound(self, user_ns: Mapping[str, Any]) -> list[str]:
        """Return the names that the notebook has rebound to a value that is cheap to send."""
        return [
            name
            for name in self._there
            if name in user_ns and not self._is_bound_to(name, value := user_ns[name]) and _is_small(value)
        ]

    def bindings(
        self,
        needs: Needs,
        user_ns: Mapping[str, Any],
        assigned: Collection[str],
        packed: Collection[str],
        *,
        cell: bool,
    ) -> Bindings | None:
        """Return the names to bind for a program, and note that they are bound; None if they are bound already.

        Args:
            needs: The names that the program reads.
            user_ns: The notebook's variables.
            assigned: The names that the program assigns.
            packed: The names whose values are sent with the program.
            cell: True for a cell, which always binds its names: a thread of an earlier cell may have changed them.
        """
        names = tuple(needs.names)
        plain = {name: value for name, value in needs.plain.items() if not self.is_sent(name, value)}
        if not (cell or plain or not set(packed).isdisjoint(names) or not self._are_bound(names, user_ns)):
            return None
        staying = self.keep(user_ns, set(assigned).difference(names))
        self.latest = names
        for name, value in {**plain, **{name: user_ns[name] for name in needs.imports}}.items():
            self.send(name, value)
        return Bindings(
            names=names,
            staying=staying,
            imports=needs.imports,
            plain=self._tracker.pack_loose(plain) if plain else None,
        )

    def _are_bound(self, names: tuple[str, ...], user_ns: Mapping[str, Any]) -> bool:
        """Return whether the latest snapshot has bound the names that a call needs, and no bound name was deleted."""
        return self.latest is not None and set(names) <= set(self.latest) and self.exist(user_ns)

    def exist(self, user_ns: Mapping[str, Any]) -> bool:
        """Return whether the notebook still has all names that are bound."""
        return user_ns.keys() >= self._there

    def keep(self, user_ns: Mapping[str, Any], assigned: Collection[str]) -> tuple[str, ...]:
        """Return the notebook's names that stay bound on the engines although a program does not read them.

        A name whose object was freed does not stay. A name that the program assigns stays only if it is bound to the
        same value on all replicas and in the notebook: a replica does not notice the assignment of the value that the
        name already has.
        """
        staying = tuple(
            name
            for name in user_ns
            if isinstance(name, str)
            and is_user_name(name, user_ns)
            and not self._is_freed(name)
            and (name not in assigned or self._is_common(name, user_ns[name]))
        )
        self._there.intersection_update(staying)
        for name in self._values.keys() - self._there:
            del self._values[name]
            self._sent.discard(name)
        return staying

    def _is_common(self, name: str, value: Any) -> bool:
        return self._is_bound_to(name, value) and (type(value) not in HANDLES or isinstance(value, Mirrored))

    def _is_freed(self, name: str) -> bool:
        value = self._values.get(name)
        return type(value) is weakref.ref and value() is None

    def _is_bound_to(self, name: str, value: Any) -> bool:
        known = self._values.get(name, _UNKNOWN)
        if type(known) is weakref.ref:
            return known() is value
        if known is _UNKNOWN:
            return name in self._tracker and self._tracker.root(name) is value
        return known is value or (type(value) not in HANDLES and same(known, value))


def _is_small(value: Any) -> bool:
    kind = type(value)
    return kind in HANDLES or issubclass(kind, types.ModuleType) or is_plain(value)
