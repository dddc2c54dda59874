"""The core without a feature: with an import hook that refuses its folder, the core loads, and its use is refused."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import distnb
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[3]
WITHOUT = """
import importlib
import importlib.abc
import pkgutil
import sys

refused = {refused!r}


class Refusal(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == each or name.startswith(each + ".") for each in refused):
            raise ModuleNotFoundError("refused: " + name, name=name)


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

RUN = """
import torch
from distnb.strategies.base import WORDS, class_of

for word in WORDS:
    class_of(word)

def program():
    strategy = distnb.get_strategy()
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        distnb.nn.compute_average_loss(model(x).square().mean(1)).backward()
        optimizer.step()

    before = model.weight.detach().clone()
    for batch in strategy.distribute_dataset(torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=4)):
        strategy.run(step, args=(batch,))
    assert not model.weight.equal(before)

program()
with distnb.OneDeviceStrategy("cpu:0").scope():
    program()
distnb.visualize(torch.nn.Linear(2, 1))
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
    "kernels": "importlib.import_module('distnb.features').require('commands', 'kernel')",
    "machines": "distnb.start(on=distnb.SSH(['a']))",
    "servers": "distnb.ParameterServerStrategy()",
    "sharded": "distnb.ShardedStrategy(['cpu:0', 'cpu:1'])",
}
"""The use of a feature that its absence refuses, as one statement."""


def run_without(features: list[str], code: str) -> str:
    """Run code in a process that has loaded torch, but not distnb, and refuses features. Return its output."""
    text = WITHOUT.format(refused=[f"distnb.{each}" for each in features]) + code
    [ended] = run_ranks(text, 1, env={"RANK": "", "WORLD_SIZE": ""})
    return ended.check().stdout


@pytest.mark.parametrize("feature", USES)
def test_the_core_runs_without_a_feature_whose_use_is_refused(feature: str) -> None:
    refusal = run_without([feature], LOAD + RUN + USE.format(use=USES[feature]))
    assert "belongs to a feature that this installation of distnb lacks" in refusal


def test_no_servers_are_started_without_their_feature() -> None:
    assert "belongs to a feature" in run_without(["servers"], USE.format(use="distnb.start(workers=1, ps=1)"))


def test_the_core_loads_without_any_of_these_features() -> None:
    run_without([*USES], LOAD)


@pytest.mark.features
def test_every_extension_point_is_described() -> None:
    root = Path(distnb.__path__[0])
    added = {point for path in root.glob("*/feature.py") for point in re.findall(r'add\("([^"]+)"', path.read_text())}
    table = (root / "README.md").read_text(encoding="utf-8").partition("## Global state")[0]
    described = {name for row in re.findall(r"(?m)^\| ([^|]+) \|", table) for name in row.split(", ")}
    assert described - {"point"} == added


def test_the_register_loads_no_library() -> None:
    code = "import sys\nfrom distnb import features\nfeatures.names('')\nassert not {'keras', 'torch'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("feature", USES)
def test_no_file_of_the_core_names_a_feature(feature: str) -> None:
    package = Path(distnb.__file__).parent
    files = [file for room in (*CORE, "magics", "widgets") for file in package.joinpath(room).rglob("*.py")]
    naming = [str(file) for file in files if f"distnb.{feature}" in file.read_text(encoding="utf-8")]
    assert not naming


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the repository from which the folders of all features, and of their tests, are deleted."""
    copied = tmp_path_factory.mktemp("bare")
    for name in ("distnb", "docs", "extension", "notebooks", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "node_modules", *(USES if name in ("distnb", "tests") else ()))
        shutil.copytree(ROOT / name, copied / name, ignore=ignored)
    for file in ("ARCHITECTURE.md", "CHANGELOG.md", "README.md", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / file, copied / file)
    return copied


def run_in(bare: Path, *command: str) -> None:
    """Run a Python program in a copy of the repository, with its package instead of the installed one."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**inherited, "PYTHONPATH": str(bare)}
    done = subprocess.run(
        [sys.executable, *command], env=environment, cwd=bare, capture_output=True, text=True, timeout=3000, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]


@pytest.mark.soak
@pytest.mark.timeout(3100)
def test_the_quick_start_runs_where_the_features_are_deleted(bare: Path, tmp_path: Path) -> None:
    run_in(bare, "notebooks/demo.py", "--out", str(tmp_path))


@pytest.mark.soak
@pytest.mark.timeout(3100)
def test_the_cores_tests_pass_where_the_features_are_deleted(bare: Path) -> None:
    """Run all but those of this folder, which compare files with documents."""
    marks = "not soak and not features"
    spread = ("-n", "2", "--dist", "loadfile", "--ignore=tests/core/house")
    run_in(bare, "-m", "pytest", "tests/core", "-q", "-p", "no:cacheprovider", *spread, "-m", marks)
