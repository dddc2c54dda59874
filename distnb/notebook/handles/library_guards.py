"""Clear errors where torch or Keras is given a handle, though it needs the object, which lives on the replicas."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

from distnb.errors import ContextError

__all__ = ["install"]

_GUARDED = {
    "torch": ("nn.Module.add_module", "optim.Optimizer.add_param_group"),
    # Not `__init__`, because Keras inspects the names of its arguments.
    "keras": ("Model.__new__", "Sequential.add", "Model.compile", "models.clone_model", "models.save_model"),
}
_guarded: set[str] = set()


def install() -> None:
    """Guard the libraries that are loaded, without loading any. Idempotent."""
    for library in _GUARDED.keys() - _guarded:
        module = sys.modules.get(library)
        if module is not None and all(_has(module, path) for path in _GUARDED[library]):
            _guarded.add(library)
            for path in _GUARDED[library]:
                _guard(module, library, path)


def _has(module: Any, path: str) -> bool:
    """Return whether a library has been loaded up to this attribute."""
    try:
        functools.reduce(getattr, path.split("."), module)
    except AttributeError:
        return False
    return True


def _guard(module: Any, library: str, path: str) -> None:
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, module)
    if isinstance(owner, type):  # the class that defines the method, which may be a base class
        owner = next(cls for cls in owner.__mro__ if name in vars(cls))
    plain: Callable[..., Any] = getattr(owner, name)
    shown = ".".join((library, *owners[:1])) if name.startswith("__") else f"{library}.{path}"

    @functools.wraps(plain)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        for handle in _handles_in((args, kwargs)):
            raise _error(shown, handle, sys._getframe(1))
        return plain(*args, **kwargs)

    setattr(owner, name, staticmethod(guarded) if name == "__new__" else guarded)


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
        f"{shown} was given {what}: the object itself lives on the replicas, and the notebook has nothing to build on. "
        "Do this where the object is: in the body of `with strategy.scope():` or in a %%distribute cell. "
        "strategy.local_results(handle)[0] is a copy of it for the notebook."
    )
