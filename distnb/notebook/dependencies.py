"""The modules and packages that engines on other machines need: local modules are sent, and versions are compared."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Mapping, Sequence

from distnb.cluster.package_versions import differs, package_of, version_here
from distnb.machines.modules.local_modules import LocalModules, local_file
from distnb.notebook.output.wording import ranges
from distnb.runtime.this_process import this_process

__all__ = ["Dependencies", "cure_for_missing"]

_OF_EVERY_PROGRAM = ("torch", "numpy", "cloudpickle")


class Dependencies:
    """The modules that programs need on other machines.

    Args:
        hosts: The machine of each engine.
        packages: The versions of the packages on each machine. Machines without an entry are not compared.
        announce: Shows a notice to the user.
        sync: Whether local modules are sent.

    Attributes:
        local_modules: The local modules; None if they are not sent.
    """

    def __init__(
        self,
        hosts: Mapping[int, str],
        packages: Mapping[str, Mapping[str, str]],
        announce: Callable[[str], None],
        *,
        sync: bool,
    ) -> None:
        self._hosts = hosts
        self._packages = packages
        self._announce = announce
        self._needed: set[str] = set()
        self._imports: frozenset[str] = frozenset()  # by local modules
        self._compared: set[str] = set()
        self.local_modules = LocalModules(announce) if sync else None

    def begin(self, user_ns: Mapping[str, object]) -> None:
        """Compare the packages that the notebook has imported before the engines were started."""
        modules = [value.__name__ for value in list(user_ns.values()) if isinstance(value, types.ModuleType)]
        self.need((*_OF_EVERY_PROGRAM, *modules))

    def need(self, modules: Collection[str]) -> None:
        """Prepare for code that imports these modules. A notice reports each package that differs once."""
        imports = self._imports
        if self.local_modules is not None:
            self.local_modules.need(modules)
            imports = self.local_modules.imports
        if imports is self._imports and self._needed.issuperset(modules):
            return
        self._imports = imports
        self._needed.update(modules)
        new = {name.partition(".")[0] for name in (*modules, *imports)} - self._compared
        self._compared |= new
        unlike = []
        for package in sorted({found for name in new if not self._is_sent(name) and (found := package_of(name))}):
            unlike += self._differences(package)
        if unlike:
            self._report(unlike)

    def _is_sent(self, module: str) -> bool:
        return self.local_modules is not None and self.local_modules.sends(module)

    def _differences(self, package: str) -> list[tuple[str, str]]:
        """Return the package and a text for each group of engines whose machine has another version, or none."""
        engines: dict[str, list[int]] = {}
        for engine, host in self._hosts.items():
            if host in self._packages and differs(package, self._packages[host]):
                engines.setdefault(host, []).append(engine)
        found = []
        for host, theirs in engines.items():
            version = self._packages[host].get(package)
            who = f"engine{'s' if len(theirs) > 1 else ''} {', '.join(ranges(theirs))} on {host}"
            verb = "have" if len(theirs) > 1 else "has"
            which = f"{package} {version}" if version else f"no {package}"
            found.append((package, f"{who} {verb} {which}, this notebook has {version_here(package)}"))
        return found

    def _report(self, unlike: Sequence[tuple[str, str]]) -> None:
        wanted = {package: f"{package}=={(version_here(package) or '').partition('+')[0]}" for package, _ in unlike}
        local = [name for name in wanted if local_file(name.replace("-", "_"))]
        text = f"distnb: {'; '.join(text for _, text in unlike)}."
        if to_install := " ".join(each for name, each in wanted.items() if name not in local):
            text += f" To install the same there: pip install {to_install}."
        if local:
            text += f" `{'`, `'.join(local)}` is local: %distnb start --sync sends it."
        if "torch" in wanted:
            text += " Tensors and collectives may fail between versions of torch."
        self._announce(text)


def cure_for_missing(error: BaseException) -> str:
    """Return the cure for an import that failed on another machine although the notebook has the module, or ""."""
    if not isinstance(error, ModuleNotFoundError) or not error.name or not this_process.machines():
        return ""
    path = local_file(error.name)
    if path is None:
        return ""
    found = f"{error.name} is a local module of this notebook: {path}."
    local = this_process.local_modules
    if local is None:
        return (
            f"{found} Start the engines with --sync, or distnb.start(..., sync=True), and it is sent to their machines."
        )
    return local.refusal(error.name) or (
        f"{found} It was not sent, since no import statement names it. Import it in an ordinary cell first."
    )
