"""The session's part for engines on other machines: it prepares them for each program.

Before a program the files of the folders that `--sync` names are sent to the engines that lack them, and packages that
the program's code imports are compared. The engines write files on their control threads, so also while they compute.
"""

from __future__ import annotations

import itertools
import sys
import threading
import types
from collections.abc import Collection, Mapping
from typing import Any

from distnb.cluster.engine_owner import EngineOwner
from distnb.errors import ClusterError
from distnb.machines.users_code.package_comparison import PackageComparison, local_file
from distnb.machines.users_code.received_files import FilesWritten, WriteFiles
from distnb.machines.users_code.sent_folders import SentFolders, changes
from distnb.notebook.session_part import SessionPart
from distnb.objects.modes.environment import current_cell
from distnb.runtime.this_process import this_process

__all__ = ["Preparation", "cure_for_missing"]

_PATIENCE_S = 60.0
_LARGE_NBYTES = 16 << 20
_OF_EVERY_PROGRAM = ("torch", "numpy", "cloudpickle")


class Preparation(SessionPart):
    """The preparation of the engines for programs, by `this_process.before_program`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        facts = self._engines.owner.facts
        self._folders = facts.folders
        self._reader = SentFolders(facts.folders)
        self._packages = PackageComparison(facts.hosts, facts.packages, _announce, facts.folders)
        self._moment: object = None
        self._files: Mapping[str, bytes] = {}
        self._sent: dict[int, tuple[int, Mapping[str, bytes]]] = {}  # by engine: its process, and the files that it has
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        this_process.before_program, this_process.cure_for = self.before_program, self.cure_for

    @classmethod
    def is_needed(cls, owner: EngineOwner) -> bool:
        """Return whether engines run on other machines."""
        return bool(owner.facts.hosts)

    def begin(self, user_ns: Mapping[str, object]) -> None:
        """Compare the packages that the notebook has imported before the engines were started."""
        modules = [value.__name__ for value in list(user_ns.values()) if isinstance(value, types.ModuleType)]
        self._packages.compare((*_OF_EVERY_PROGRAM, *modules))

    def before_program(self, modules: Collection[str]) -> None:
        """Prepare for a program whose code imports these modules.

        Raises:
            OptionError: The folders have too many files, or too large ones.
            ClusterError: An engine could not write the files.
        """
        if modules:
            self._packages.compare(modules)
        if self._folders:
            with self._lock:
                self._send()

    def cure_for(self, error: BaseException) -> str:
        """Return the cure for an import that failed on another machine although the notebook has the module, or ""."""
        return cure_for_missing(error, self._folders)

    def close(self) -> None:
        """Prepare programs no longer."""
        if this_process.before_program == self.before_program:
            this_process.before_program, this_process.cure_for = None, lambda error: ""

    def _send(self) -> None:
        """Send each engine of another machine the files that it lacks. They are read again once in each cell."""
        moment = current_cell(), len(sys.modules), next(reversed(sys.modules), "")
        if moment != self._moment:
            self._files, self._moment = self._reader.read(), moment
        cluster = self._engines.cluster
        processes = {engine: hello.pid for engine, hello in self._engines.supervisor.hellos.items()}
        lacking: dict[int, list[int]] = {}  # engines that have the same files, by the identity of these
        for engine in self._engines.left:
            if engine in processes and cluster.host(engine):
                process, known = self._sent.get(engine, (0, None))
                known = known if process == processes[engine] else None
                if known is not self._files:
                    lacking.setdefault(id(known), []).append(engine)
        for engines in lacking.values():
            process, known = self._sent.get(engines[0], (0, None))
            self._write(engines, known if process == processes[engines[0]] else None)
            self._sent.update({engine: (processes[engine], self._files) for engine in engines})

    def _write(self, engines: list[int], earlier: Mapping[str, bytes] | None) -> None:
        changed = changes(self._files, earlier or {})
        message = WriteFiles(number=next(self._numbers), folders=self._folders, files=changed, whole=earlier is None)
        nbytes = sum(len(content) for content in changed.values() if content is not None)
        if nbytes > _LARGE_NBYTES:
            _announce(f"distnb: sending {nbytes / 1e6:,.0f} MB of the folders of --sync to each engine")
        errors: dict[int, str] = {}

        def is_answer(event: Any) -> bool:
            if not isinstance(event, FilesWritten) or event.number != message.number:
                return False
            if event.error:
                errors[event.engine] = event.error
            return True

        if not self._engines.supervisor.ask(engines, message, is_answer, _PATIENCE_S):
            raise ClusterError(
                f"One of the engines {', '.join(map(str, engines))} has not received the files of --sync within "
                f"{_PATIENCE_S:.0f} s: native code may hold Python's lock there (%distnb stacks). Replace the engine: "
                "%distnb restart ENGINE."
            )
        for engine, error in errors.items():
            raise ClusterError(
                f"Engine {engine} on {self._engines.cluster.host(engine)} cannot write the files of --sync: {error}"
            )


def cure_for_missing(error: BaseException, folders: Collection[str]) -> str:
    """Return the cure for an import that failed on another machine although the notebook has the module, or ""."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    path = local_file(error.name)
    if path is None:
        return ""
    found = f"{error.name} is a local module of this notebook: {path}."
    if not folders:
        return (
            f"{found} Start the engines with --sync, or distnb.start(..., sync=True), and the notebook's folder is "
            "sent to their machines; --sync FOLDER sends another one."
        )
    if not any(path.startswith(f"{folder}/") for folder in folders):
        return f"{found} It is not in a folder that --sync sends ({', '.join(folders)}). Name its folder, too."
    if not path.endswith(".py"):
        return f"{found} Only Python code and data are sent. Install it on the engines' machines."
    return f"{found} The file is new: folders are sent before each cell. Run the cell again."


def _announce(text: str) -> None:
    print(text, file=sys.stderr)
