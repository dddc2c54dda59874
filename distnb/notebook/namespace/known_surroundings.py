"""The surroundings of programs on one group of engines, as far as the notebook knows them."""

from __future__ import annotations

from collections.abc import Mapping

from distnb.objects.modes.environment import (
    Environment,
    Moment,
    apply_environment,
    capture_environment,
    is_current,
    watch_seeds,
)
from distnb.wire.exchange import Reloads, Surroundings

__all__ = ["KnownSurroundings"]


class KnownSurroundings:
    """The modes, the texts of cells and the reloads of modules that a group's engines have.

    The modes are unknown after the replicas have changed them differently.
    """

    def __init__(self) -> None:
        self._environment: Environment | None = None
        self._set_by: dict[str, int] = {}  # the serial of the program that changed a mode last, by mode
        self._sources: dict[str, int] = {}  # hashes of texts, by file name
        self._modules: dict[str, Reloads] = {}
        watch_seeds()

    def clear(self) -> None:
        """Forget everything, since an engine may have something else."""
        self._environment = None
        self._sources.clear()
        self._modules.clear()

    def are_current(self) -> bool:
        """Return whether no mode has changed since the latest call of `changes`, in this cell."""
        return self._environment is not None and is_current(self._environment)

    def changes(
        self, moment: Moment, sources: Mapping[str, tuple[str, str]], modules: Mapping[str, Reloads]
    ) -> Surroundings | None:
        """Return the changes for a program, and note that the engines have them. Return None if there are none.

        Args:
            moment: The moment at which the notebook's modes are captured.
            sources, modules: The sources and modules that the program needs. See `Surroundings`.
        """
        captured, changed = capture_environment(self._environment, moment), None
        if captured is not self._environment:
            changed, self._environment = captured.since(self._environment), captured
        new_sources = {name: source for name, source in sources.items() if self._sources.get(name) != hash(source)}
        new_modules = {name: reloads for name, reloads in modules.items() if self._modules.get(name) != reloads}
        if not (changed is not None and changed.modes) and not new_sources and not new_modules:
            return None
        self._sources.update({name: hash(source) for name, source in new_sources.items()})
        self._modules.update(new_modules)
        environment = changed if changed is not None and changed.modes else None
        return Surroundings(environment=environment, sources=new_sources, modules=new_modules)

    def in_order(self, environment: Environment | None, serial: int) -> Environment | None:
        """Return the modes that a program changed, except those set by a later program whose results came first."""
        if environment is None:
            return None
        modes = {name: value for name, value in environment.modes.items() if self._set_by.get(name, 0) < serial}
        self._set_by.update(dict.fromkeys(modes, serial))
        return Environment(modes, environment.cell)

    def accept(self, environment: Environment | None, *, alike: bool) -> None:
        """Set the notebook's modes to those that a program has changed; `alike` if all replicas changed the same."""
        if environment is not None:
            apply_environment(environment)
        if self._environment is not None:
            self._environment = self._environment.with_changes(environment) if alike else None
