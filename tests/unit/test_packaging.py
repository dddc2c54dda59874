"""The papers of the package agree with one another."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINS = {
    canonicalize_name(requirement.name): requirement
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line.strip() and not line.startswith("#")
    for requirement in [Requirement(line)]
}
ASKED_FOR = [
    Requirement(text)
    for group in [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    for text in group
    if not text.startswith("distnb")
]


@pytest.mark.parametrize("asked", ASKED_FOR, ids=lambda requirement: requirement.name)
def test_what_is_asked_for_is_pinned_within_its_range(asked: Requirement) -> None:
    pin = PINS[canonicalize_name(asked.name)]
    (exact,) = pin.specifier
    assert exact.operator == "=="
    assert exact.version in asked.specifier


@pytest.mark.parametrize("paper", ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md"])
def test_commands_and_paths_in_a_paper_exist(paper: str) -> None:
    text = (ROOT / paper).read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert set(re.findall(r"(?:`|\$ )make ([a-z]+)", text)) <= targets
    paths = re.findall(r"`((?:distnb|tests|benchmarks|notebooks|extension)/[\w./]*)`", text)
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing


def test_the_quick_start_is_the_cell_that_the_readme_shows() -> None:
    """The README's program is the notebook's, so that it is run by the tests."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    notebook = json.loads((ROOT / "notebooks" / "quickstart.ipynb").read_text(encoding="utf-8"))
    sources = ["".join(cell["source"]) for cell in notebook["cells"]]
    (shown,) = re.findall(r"```python\n(%%distribute.*?)```", readme, flags=re.DOTALL)
    assert any(shown.strip() in source for source in sources)
