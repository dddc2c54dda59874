"""Features: folders of the package that the core does not know, and the extension points where they add to it.

A folder is a feature if it has a module `feature`. That module loads nothing of its folder: it names objects, by place
and by text, and the core loads an object when it needs it. Deleting the folder removes the feature. For example,
`distnb/sharded/feature.py` contains

    add("sharded models", "runtime", "distnb.sharded.sharded_objects:make_runtime")

and the core calls `require("sharded models", "runtime")(process, strategy)`.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

from distnb.errors import MissingFeatureError

__all__ = ["add", "check", "every", "find", "missing", "names", "require"]

_places: dict[str, dict[str, str]] = {}


def add(point: str, name: str, place: str) -> None:
    """Add an object to an extension point. Only modules named `feature` call this.

    Args:
        point: The extension point (distnb/README.md lists them).
        name: The name under which the core asks for the object.
        place: The object's `module:attribute`, or `module` for the module itself.
    """
    _places.setdefault(point, {})[name] = place


def find(point: str, name: str) -> Any:
    """Return the object that a feature added under this name, or None if there is none."""
    place = _added(point).get(name)
    return None if place is None else _object(place)


def require(point: str, name: str) -> Any:
    """Return the object that a feature added under this name.

    Raises:
        MissingFeatureError: No feature has added it.
    """
    check(point, name)
    return find(point, name)


def check(point: str, name: str) -> None:
    """Raise MissingFeatureError if no feature has added an object under this name. Nothing else is loaded."""
    if name not in _added(point):
        raise missing(f"{name} ({point})")


def every(point: str) -> list[Any]:
    """Return all objects that features added to an extension point, in the order of the features' names."""
    return [_object(place) for place in _added(point).values()]


def missing(what: str) -> MissingFeatureError:
    """Return the error for the use of a feature that was removed."""
    return MissingFeatureError(
        f"{what} belongs to a feature that this installation of distnb lacks. Install distnb again: "
        "pip install --force-reinstall --no-deps distnb."
    )


def names(point: str) -> tuple[str, ...]:
    """Return the names under which features added objects to an extension point. Loads none of the objects."""
    return tuple(_added(point))


def _added(point: str) -> dict[str, str]:
    _load_features()
    return _places.get(point, {})


@cache
def _load_features() -> None:
    for path in sorted(Path(__file__).parent.glob("*/feature.py")):
        name = f"distnb.{path.parent.name}"
        try:
            importlib.util.find_spec(name)  # does not import it: `distnb.keras` imports Keras, which may be missing
        except ModuleNotFoundError:
            continue
        spec = importlib.util.spec_from_file_location(f"{name}.feature", path)
        assert spec is not None
        assert spec.loader is not None, "it has the suffix of Python's files"
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


@cache
def _object(place: str) -> Any:
    module, _, attribute = place.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else loaded
