"""Every notebook runs and shows its saved outputs (nbval; cells whose output varies are tagged)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import processes

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("**/*.ipynb"))
EXERCISES = sorted((ROOT / "notebooks" / "exercises").glob("*.ipynb"))
REPOSITORY = "distnb/distnb"
"""The repository that the notebooks' links assume."""
SHORTER = {"quickstart": ("EPOCHS = 15 ", "EPOCHS = 1 ")}
"""The changes for the tests in a notebook that is long enough to be watched."""
WITHOUT_CURVES = {"hang", "sharded"}
ON_RAY = ROOT / "notebooks" / "scale.ipynb"
OF_LIBRARIES = {"keras", "lightning", "transformers", "fit_text"}
"""Notebooks that load a large library: `make test` runs them if they are new. tests/keras and tests/compat are shorter."""
_STARTS_OF_RAY = 3


@pytest.mark.timeout(900)
@pytest.mark.parametrize("of_libraries", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_every_notebook_runs_and_shows_its_saved_output(of_libraries: bool, tmp_path: Path) -> None:
    """Run all in one process of nbval, whose start takes as long as a short notebook."""
    new = set() if of_libraries else _new()
    notebooks = []
    for notebook in NOTEBOOKS:
        if notebook == ON_RAY or (notebook.stem in OF_LIBRARIES and notebook not in new) is not of_libraries:
            continue
        if notebook.stem in SHORTER:
            text, (long, short) = notebook.read_text(encoding="utf-8"), SHORTER[notebook.stem]
            assert text.count(long) == 1
            notebook = tmp_path / notebook.name
            notebook.write_text(text.replace(long, short), encoding="utf-8")
        notebooks.append(notebook)
    status, output = _run(notebooks, {})
    assert status == 0, output


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_notebook_on_ray_runs_and_shows_its_saved_output() -> None:
    """Try again if Ray does not start: it gives up if its own processes take more than 15 s on a busy machine."""
    pytest.importorskip("ray", reason="Ray is not installed")
    for _ in range(_STARTS_OF_RAY):
        folder = tempfile.mkdtemp(prefix="r", dir=os.environ["TMPDIR"])  # short, since it contains sockets
        env = {"RAY_TMPDIR": folder, "RAY_raylet_start_wait_time_s": "60", "RAY_USAGE_STATS_ENABLED": "0"}
        status, output = _run([ON_RAY], env)
        shutil.rmtree(folder, ignore_errors=True)
        if "timed out during startup" not in output:
            break
    assert status == 0, output


def _new() -> set[Path]:
    """Return the notebooks that the latest commit or the working tree has changed."""
    command = ["git", "-C", str(ROOT), "diff", "--name-only", "HEAD~1", "--", "notebooks"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return {ROOT / name for name in found.stdout.splitlines()}


def _run(notebooks: Sequence[Path], env: dict[str, str]) -> tuple[int, str]:
    """Run notebooks with nbval, and return its exit status and output."""
    plugins = ["-p", "no:cacheprovider", "-p", "nbval.plugin", "-p", "tests.notebooks.warm_kernels"]
    sanitize = ROOT / "tests" / "notebooks" / "sanitize.cfg"
    options = ["--nbval", "--nbval-current-env", "--nbval-cell-timeout", "120", "--nbval-sanitize-with", sanitize]
    run = subprocess.Popen(
        [sys.executable, "-m", "pytest", *plugins, *options, *notebooks],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with processes.killed_at_end(lambda: [run.pid]):
        output, _ = run.communicate()
    return run.returncode, output


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_saved_in_readable_form(notebook: Path) -> None:
    """Check that outputs exist, errors are intended, and every picture shows without a kernel."""
    cells = [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert all(cell["execution_count"] for cell in cells)
    for cell in cells:
        failed = any(output["output_type"] == "error" for output in cell["outputs"])
        assert failed == ("raises-exception" in cell["metadata"].get("tags", ()))
    assert notebook.stem in WITHOUT_CURVES or any(
        "data:image/" in str(output.get("data", {}).get("text/html", "")) for output in outputs
    )


@pytest.mark.parametrize(
    "notebook", [*(path for path in NOTEBOOKS if path.stem == "quickstart"), *EXERCISES], ids=lambda path: path.stem
)
def test_a_notebook_opens_in_colab_and_installs_distnb_only_there(notebook: Path, tmp_path: Path) -> None:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    address = f"https://colab.research.google.com/github/{REPOSITORY}/blob/main/{notebook.relative_to(ROOT)}"
    assert f"[Open in Colab]({address})\n" in cells[0]["source"]
    line = next(cell for cell in cells if cell["cell_type"] == "code")["source"][0]
    (tmp_path / "pip").write_text('#!/bin/sh\necho "$@" >> "$0.called"\n')
    (tmp_path / "pip").chmod(0o755)
    sites = ("COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE")
    env = {name: value for name, value in os.environ.items() if name not in sites}
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    called = tmp_path / "pip.called"
    for more in ({}, *({site: "x"} for site in sites)):
        assert called.exists() is False
        assert subprocess.run(["sh", "-c", line.removeprefix("!")], env={**env, **more}, check=False).returncode == 0
        if more:
            assert called.read_text().startswith("install -q distnb[demo")
            called.unlink()
