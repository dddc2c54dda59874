"""The names that a notebook has bound to engine objects, saved for the next notebook of a detached cluster.

The engines know their objects by ids, and only the notebook knows which of its variables refers to which. It writes
them to a file in the cluster's directory after each cell, so they survive its own end.
"""

from __future__ import annotations

import os
import pickle
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distnb.notebook.handles.handle import HANDLES, state_of_handle
from distnb.notebook.namespace.user_names import user_names
from distnb.notebook.remote_dataset import RemoteDataset
from distnb.values import Mirrored
from distnb.wire.messages import ObjectId

__all__ = ["SavedName", "SavedNames"]

_FILE = "names.pickle"


@dataclass(frozen=True)
class SavedName:
    """A name that is bound to an engine object.

    Attributes:
        identity: The object's id on the engines.
        mirrored: Whether the notebook's handle was a Mirrored.
    """

    identity: ObjectId
    mirrored: bool


@dataclass(frozen=True)
class SavedNames:
    """The names of a notebook.

    Attributes:
        bound: The names that are bound to engine objects.
        modules: The names of modules, with the modules' own names.
        others: All other names of the user, whose values were in the notebook's process.
        program: The latest program, whose end the notebook has seen.
    """

    bound: Mapping[str, SavedName] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    program: int = 0

    @classmethod
    def of(cls, user_ns: Mapping[str, Any], program: int) -> SavedNames:
        """Return the names of a namespace after a program."""
        bound: dict[str, SavedName] = {}
        modules: dict[str, str] = {}
        others: list[str] = []
        for name in sorted(user_names(user_ns)):
            value = user_ns[name]
            handle = value.handle if type(value) is RemoteDataset else value
            if type(handle) in HANDLES:
                state = state_of_handle(handle)
                if not state.tracked.ended:
                    bound[name] = SavedName(state.identity, isinstance(handle, Mirrored))
            elif isinstance(handle, types.ModuleType):
                modules[name] = handle.__name__
            else:
                others.append(name)
        return cls(bound, modules, tuple(others), program)

    def save(self, directory: Path) -> None:
        """Write the names. A process that is killed meanwhile leaves the file as it was."""
        temporary = directory / f"{_FILE}.new"
        temporary.write_bytes(pickle.dumps(self))
        os.replace(temporary, directory / _FILE)

    @classmethod
    def load(cls, directory: Path) -> SavedNames:
        """Read the names; there are none before the first cell."""
        try:
            found: SavedNames = pickle.loads((directory / _FILE).read_bytes())
        except FileNotFoundError:
            return cls()
        return found
