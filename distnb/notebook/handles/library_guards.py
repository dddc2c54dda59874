"""Clear errors for handles that are passed to functions of torch and Keras that need the objects themselves."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

from distnb.compat import patches
from distnb.errors import ContextError, LibraryVersionError

__all__ = ["install"]

_GUARDED = {
    "torch": {
        "torch.nn:Module.add_module": "torch.nn.Module.add_module",
        "torch.optim:Optimizer.add_param_group": "torch.optim.Optimizer.add_param_group",
    },
    "keras": {
        "keras:Model.__new__": "keras.Model",  # not `__init__`, because Keras inspects the names of its arguments
        "keras:Sequential.add": "keras.Sequential.add",
        "keras:Model.compile": "keras.Model.compile",
        "keras.models:clone_model": "keras.models.clone_model",
        "keras.models:save_model": "keras.models.save_model",
    },
}
"""The guarded functions by library: their targets in the table of patches, and the names that errors show."""

_guarded: set[str] = set()


def install() -> None:
    """Guard the libraries that are loaded, without loading any. Further calls guard libraries loaded since."""
    for library in _GUARDED.keys() - _guarded:
        if library in sys.modules and all(map(_is_loaded, _GUARDED[library].values())):
            _guarded.add(library)
            with suppress(LibraryVersionError):  # an untested version keeps its own errors
                for target, shown in _GUARDED[library].items():
                    patches.wrap(target, functools.partial(_guard, shown))


def _is_loaded(name: str) -> bool:
    """Return whether a library has been loaded up to this attribute."""
    library, *names = name.split(".")
    try:
        functools.reduce(getattr, names, sys.modules[library])
    except AttributeError:
        return False
    return True


def _guard(shown: str, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    for handle in _handles_in((args, kwargs)):
        raise _error(shown, handle, sys._getframe(2))
    return plain(*args, **kwargs)


def _handles_in(value: Any) -> Iterator[Any]:
    from distnb.notebook.handles.handle import HANDLES  # here, since that module installs the guards

    if isinstance(value, HANDLES):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _handles_in(each)
    elif isinstance(value, Mapping):
        yield from _handles_in(list(value.values()))


def _error(shown: str, handle: Any, frame: FrameType | None) -> ContextError:
    name = None
    while frame is not None and name is None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _GUARDED:
            name = next((each for each, value in frame.f_locals.items() if value is handle and each[:1] != "_"), None)
        frame = frame.f_back
    what = f"`{name}`, which is a handle" if name is not None else "a handle"
    return ContextError(
        f"{shown} was given {what}: the object itself lives on the replicas, not in the notebook. Use the object "
        "there: in the body of `with strategy.scope():` or in a %%distribute cell. strategy.local_results(handle)[0] "
        "is a copy of it for the notebook."
    )
