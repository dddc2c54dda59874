"""The program behind `make demo`: run the quick start, print its results, and save the notebook and an HTML copy.

Usage:
    python notebooks/demo.py [--out FOLDER] [--notebook FILE]
"""

from __future__ import annotations

import argparse
import ast
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter

HERE = Path(__file__).parent
CELL_LIMIT_S = 300


def main(arguments: list[str] | None = None) -> int:
    """Run the demo and return the exit status."""
    parser = argparse.ArgumentParser(description="Run distnb's quick start on this machine.")
    parser.add_argument("--notebook", type=Path, default=HERE / "quickstart.ipynb", help="the notebook to run")
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "demo", help="the folder for the results")
    options = parser.parse_args(arguments)

    notebook = nbformat.read(options.notebook, as_version=4)
    print(f"Running {options.notebook.name}: {_kind_of_engines()} …", flush=True)
    begin = time.monotonic()
    history: list[dict[str, float]] = []
    status = 0
    try:
        history = _execute(notebook)
    except CellExecutionError as error:
        print(error, file=sys.stderr)
        status = 1
    if history:
        print_table(history)
    executed, exported = _save(notebook, options.out, options.notebook.stem)
    print(f"\n{'Done' if status == 0 else 'FAILED'} in {time.monotonic() - begin:.0f} s.")
    print(f"Executed notebook: {executed}\nHTML with pictures: {exported}")
    return status


def print_table(history: list[dict[str, float]]) -> None:
    """Print a line for each epoch."""
    print(f"\n{'epoch':>5}  {'loss':>8}  {'accuracy':>8}")
    for row in history:
        print(f"{row['epoch']:>5}  {row['loss']:>8.4f}  {row['accuracy']:>8.1%}")


def _kind_of_engines() -> str:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return f"one engine for each of {count} GPUs" if count else "2 engines on the CPU"


def _execute(notebook: nbformat.NotebookNode) -> list[dict[str, float]]:
    """Run every cell in place, and return the mirrored training's history from the kernel."""
    client = NotebookClient(
        notebook,
        timeout=CELL_LIMIT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(HERE)}},
        extra_arguments=["--IPKernelApp.log_level=ERROR"],  # its warnings are about the kernel's own ports
    )
    with client.setup_kernel(cwd=str(HERE)):
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
        rows: list[dict[str, float]] = ast.literal_eval(_print(client, "mirrored_history"))
    return rows


def _print(client: NotebookClient, expression: str) -> str:
    """Return the output of `print(expression)` in the notebook's kernel. The cell for it is removed afterwards."""
    cells = client.nb.cells
    cells.append(nbformat.v4.new_code_cell(f"print({expression})"))
    try:
        client.execute_cell(cells[-1], len(cells) - 1, store_history=False)
        return "".join(output["text"] for output in cells[-1].outputs)
    finally:
        cells.pop()


def _save(notebook: nbformat.NotebookNode, folder: Path, stem: str) -> tuple[Path, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    executed, exported = folder / f"{stem}.ipynb", folder / f"{stem}.html"
    nbformat.write(notebook, executed)
    html, _ = HTMLExporter().from_notebook_node(notebook)
    exported.write_text(html, encoding="utf-8")
    return executed.resolve(), exported.resolve()


if __name__ == "__main__":
    sys.exit(main())
