"""Every notebook runs and shows its saved outputs (nbval; cells whose output varies are tagged)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import processes

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("**/*.ipynb"))
SHORTER = {"quickstart": ("EPOCHS = 15 ", "EPOCHS = 1 ")}
"""The changes for the tests in a notebook that is long enough to be watched."""
WITHOUT_CURVES = {"hang"}


@pytest.mark.timeout(900)
def test_every_notebook_runs_and_shows_its_saved_output(tmp_path: Path) -> None:
    """Run all in one process of nbval, whose start takes as long as a short notebook."""
    notebooks = []
    for notebook in NOTEBOOKS:
        if notebook.stem in SHORTER:
            text, (long, short) = notebook.read_text(encoding="utf-8"), SHORTER[notebook.stem]
            assert text.count(long) == 1
            notebook = tmp_path / notebook.name
            notebook.write_text(text.replace(long, short), encoding="utf-8")
        notebooks.append(notebook)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "nbval.plugin",
        "-p",
        "tests.notebooks.warm_kernels",
    ]
    command += [
        "--nbval",
        "--nbval-current-env",
        "--nbval-cell-timeout",
        "120",
        "--nbval-sanitize-with",
        ROOT / "tests" / "notebooks" / "sanitize.cfg",
    ]
    run = subprocess.Popen(
        [*command, *notebooks],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with processes.killed_at_end(lambda: [run.pid]):
        output, _ = run.communicate()
    assert run.returncode == 0, output


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
