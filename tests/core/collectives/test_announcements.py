"""Announcements of one replica, which the others find as soon as it goes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from distnb.collectives.group import announcements


class SlowStore:
    """A store like torch's TCPStore: it answers `check`, but not `set`, which takes effect at some later time."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self._on_the_way: dict[str, str] = {}

    def set(self, name: str, text: str) -> None:
        self._on_the_way[name] = text

    def check(self, names: list[str]) -> bool:
        self.texts |= self._on_the_way
        self._on_the_way.clear()
        return all(name in self.texts for name in names)


def test_a_replica_goes_on_when_the_others_can_read_its_announcement() -> None:
    store = SlowStore()
    group: Any = SimpleNamespace(membership=SimpleNamespace(client=SimpleNamespace(store=lambda: store)))
    announcements.announce(group, "group/announced/3/save/1", "")
    assert store.texts == {"group/announced/3/save/1": ""}, "another replica would report a call that is missing here"
