"""The package's metadata, documents and files agree with one another."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import distnb
from distnb.magics.commands import COMMANDS
from hatch_build import described

ROOT = Path(__file__).parents[3]
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
def test_requirements_are_pinned_within_their_ranges(asked: Requirement) -> None:
    pin = PINS[canonicalize_name(asked.name)]
    (exact,) = pin.specifier
    assert exact.operator == "=="
    assert exact.version in asked.specifier


COLAB = {
    canonicalize_name(requirement.name): requirement
    for line in (ROOT / "constraints-colab.txt").read_text(encoding="utf-8").splitlines()
    if line.strip() and not line.startswith("#")
    for requirement in [Requirement(line)]
}


def test_an_installation_changes_nothing_in_colab() -> None:
    """Check that distnb, and the packages that it adds there, accept Colab's versions."""
    waiting, seen, refused = [Requirement(text) for text in PROJECT["dependencies"]], set[str](), []
    while waiting:
        asked = waiting.pop()
        name = canonicalize_name(asked.name)
        if asked.marker is not None and not asked.marker.evaluate({"extra": ""}):
            continue
        if name == "torch":  # Colab has 2.11, with its own packages for CUDA
            assert "2.11.0" in asked.specifier
        elif name in COLAB:
            (exact,) = COLAB[name].specifier
            refused += [] if exact.version in asked.specifier else [str(asked)]
        elif name not in seen:
            seen.add(name)
            waiting += [Requirement(text) for text in importlib.metadata.requires(name) or ()]
    assert refused == []
    assert "comm" not in seen
    assert {"anywidget", "torchmetrics", "safetensors"} <= seen


PAGES_OF_FOLDERS = [str(page.relative_to(ROOT)) for page in ROOT.glob("distnb/**/README.md")]
PAPERS = [
    *("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md"),
    *PAGES_OF_FOLDERS,
    *(f"docs/{page.name}" for page in ROOT.glob("docs/*.md")),
]


@pytest.mark.parametrize("paper", PAPERS)
def test_commands_and_paths_in_documents_exist(paper: str) -> None:
    text = (ROOT / paper).read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert set(re.findall(r"(?:`|\$ )make ([a-z-]+)", text)) <= targets
    paths = re.findall(r"`((?:distnb|tests|benchmarks|notebooks|extension)/[\w./]*)`", text)
    missing = [path for path in paths if not (ROOT / path).exists()]
    linked = re.findall(r"\]\(([\w./-]+)\)", text)
    missing += [path for path in linked if not ((ROOT / paper).parent / path).exists()]
    modules = re.findall(r"`python -m (benchmarks\.\w+)`", text)
    places = {
        name: (ROOT / f"{name.replace('.', '/')}.py", ROOT / name.replace(".", "/") / "__main__.py") for name in modules
    }
    missing += [name for name, files in places.items() if not any(file.exists() for file in files)]
    assert not missing


def test_every_page_can_be_reached_from_the_readme_or_the_first_page() -> None:
    readme, index = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/index.md"))
    pages = [page.name for page in ROOT.glob("docs/*.md") if page.name != "index.md"]
    assert [name for name in pages if f"docs/{name}" not in readme and f"({name})" not in index] == []


def test_every_picture_is_shown() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in ROOT.glob("docs/*.md"))
    pictures = [path.name for path in ROOT.glob("docs/*.*") if path.suffix not in (".md", ".py")]
    assert [name for name in pictures if name not in text] == []


def test_the_commands_that_are_documented_exist() -> None:
    text = "".join((ROOT / paper).read_text(encoding="utf-8") for paper in PAPERS)
    assert set(re.findall(r"(?<!%)%distnb (\w+)", text)) <= set(COMMANDS)
    table = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert set(COMMANDS) <= set(re.findall(r"%distnb (\w+)", table))


def test_the_package_is_marked_as_typed() -> None:
    assert (ROOT / "distnb" / "py.typed").exists()


def test_the_readme_has_no_relative_links_in_the_package() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(r"\]\(docs/", readme)
    assert "src=" in readme
    for source in (None, "https://example.org/distnb/"):
        text = described(readme, source)
        linked = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'src="([^"]+)"', text)
        assert all(each.startswith("https://example.org/distnb/") for each in linked)
        assert bool(linked) == (source is not None)
        assert "Strategies" in text


def test_wheels_for_the_gpu_machine_are_pinned() -> None:
    lines = (ROOT / "benchmarks" / "gpu_wheels.txt").read_text(encoding="utf-8").splitlines()
    assert {line for line in lines if not line.startswith("#")} <= PINS.keys()


def test_the_package_names_no_url() -> None:
    assert "urls" not in PROJECT


def test_the_readmes_cells_are_the_quick_starts() -> None:
    """Check that the README's first cells are the first ones of the notebook, except for the installation in Colab."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    notebook = json.loads((ROOT / "notebooks" / "quickstart.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    section = readme.partition("## Quick start")[2].partition("\n## ")[0]
    shown = "".join(re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL))
    assert "%%distribute" in shown
    assert "\n".join([*cells, ""]).partition("\n")[2].startswith(shown)


def test_the_built_extension_matches_its_sources() -> None:
    """Check the record of sources that `make extension` writes."""
    folder = ROOT / "extension"
    noted = dict(reversed(line.split()) for line in (folder / "labextension.sha256").read_text().splitlines())
    sources = [path for name in ("src/*", "style/*", "schema/*", "*.json", ".npmrc") for path in folder.glob(name)]
    found = {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sources}
    assert found == noted
    built = json.loads((folder / "labextension" / "package.json").read_text(encoding="utf-8"))
    assert (folder / "labextension" / built["jupyterlab"]["_build"]["load"]).exists()
    assert built["version"] == distnb.__version__
    assert '"resolved"' not in (folder / "package-lock.json").read_text(encoding="utf-8"), "it names no host"
