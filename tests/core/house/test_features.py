"""The core without a feature: with an import hook that refuses its folder, the core loads, and its use is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT = """
import importlib
import importlib.abc
import pkgutil
import sys

refused = sys.argv[1].split(",")


class Refusal(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == each or name.startswith(f"{each}.") for each in refused):
            raise ModuleNotFoundError(f"refused: {name}", name=name)


sys.meta_path.insert(0, Refusal())

import distnb
from distnb.errors import MissingFeatureError
"""

CORE = ("magics", "notebook", "engine", "wire", "objects", "strategies", "runtime", "collectives", "input", "variables")
CORE = (*CORE, "values", "cluster", "compat", "watching")

LOAD = f"""
for room in {CORE!r}:
    package = importlib.import_module(f"distnb.{{room}}")
    for module in pkgutil.walk_packages(package.__path__, f"distnb.{{room}}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
"""

USE = """
try:
    {use}
except MissingFeatureError as error:
    print(error)
else:
    raise SystemExit("not refused")
"""

USES = {
    "checkpoint": "distnb.Checkpoint()",
    "detached": "distnb.start(1, detach=True)",
    "estimator": "distnb.estimator",
    "keras": "distnb.keras",
    "machines": "distnb.start(on=distnb.SSH(['a']))",
    "sharded": "distnb.ShardedStrategy(['cpu:0', 'cpu:1'])",
}
"""The use of a feature that its absence refuses, as one statement."""


def run_without(features: list[str], code: str) -> str:
    """Run code in a new interpreter that refuses features. Return its output."""
    refused = ",".join(f"distnb.{each}" for each in features) or "none"
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + code, refused], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("feature", USES)
def test_the_core_loads_without_a_feature_whose_use_is_refused(feature: str) -> None:
    refusal = run_without([feature], LOAD + USE.format(use=USES[feature]))
    assert "belongs to a feature that this installation of distnb lacks" in refusal


def test_the_core_loads_without_any_of_these_features() -> None:
    run_without([*USES], LOAD)


def test_the_register_loads_no_library() -> None:
    run_without([], "from distnb import features\nfeatures.names('')\nassert not {'keras', 'torch'} & {*sys.modules}")
