"""Every class and every module of distnb has a name of its own, and no folder holds too many modules."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from pathlib import Path

import distnb

ROOT = Path(distnb.__path__[0])

MODULES_PER_FOLDER = 15

SHARED_MODULE_NAMES = {
    "__main__": "Python gives it to what `python -m` runs",
    "base": "the abstract base class of each folder",
    "checkpoint": "a folder whose main module holds the public class of that name",
    "coordinator": "a folder whose main module holds the public class of that name",
    "estimator": "a folder whose main module holds the public class of that name",
    "namespace": "a folder at both ends, in the notebook and in the engine",
    "output": "a folder at both ends, in the notebook and in the engine",
    "plans": "a folder at both ends, in the notebook and in the engine",
    "programs": "a folder at both ends, in the notebook and in the engine",
    "sharded": "a feature, and its strategy",
}


def shared(places: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: found for name, found in places.items() if len(found) > 1}


def classes() -> dict[str, list[str]]:
    """Return where classes of each name are defined."""
    found = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def modules() -> dict[str, list[str]]:
    """Return where modules and packages of each name are.

    Each feature has a module `feature`, and may have a folder for its part of a room, such as `servers/engine/`.
    """
    found = defaultdict(list)
    rooms = {path.name for path in ROOT.iterdir() if path.is_dir()}
    for path in sorted(ROOT.rglob("*.py")):
        place = (path.parent if path.name == "__init__.py" else path).relative_to(ROOT)
        is_part_of_a_room = path.name == "__init__.py" and len(place.parts) == 2 and place.name in rooms
        if place.stem != "feature" and not is_part_of_a_room:
            found[place.stem].append(str(place))
    return found


def test_no_two_classes_share_a_name() -> None:
    assert shared(classes()) == {}


def test_no_two_modules_share_a_name() -> None:
    assert shared({name: places for name, places in modules().items() if name not in SHARED_MODULE_NAMES}) == {}


def test_every_allowed_shared_name_is_shared() -> None:
    assert set(shared(modules())) == set(SHARED_MODULE_NAMES)


def test_no_folder_holds_more_modules_than_a_reader_can_survey() -> None:
    public = {ROOT / f"{name}.py" for name in distnb.__all__}  # namespaces such as `distnb.coordinator`
    counts = Counter(path.parent for path in ROOT.rglob("*.py") if path.name != "__init__.py" and path not in public)
    del counts[ROOT / "compat"]  # it has one file per library
    assert {str(folder) for folder, count in counts.items() if count > MODULES_PER_FOLDER} == set()
