"""The notebooks, and a notebook's abilities, with the versions of Colab's and Kaggle's kernels: `make colab`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kernel import Notebook

pytestmark = [pytest.mark.soak, pytest.mark.processes, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PYTHON = Path(sys.prefix) / "colab" / "bin" / "python"
NOTEBOOKS = [
    *(ROOT / "notebooks" / f"{name}.ipynb" for name in ("quickstart", "guide", "keras", "parameter_servers")),
    *sorted((ROOT / "notebooks" / "exercises").glob("*.ipynb")),
]


@pytest.fixture(scope="module")
def python() -> Path:
    if not PYTHON.exists():
        pytest.skip("make colab installs the environment")
    return PYTHON


@pytest.fixture(scope="module")
def kernel(python: Path) -> Iterator[Notebook]:
    with Notebook(engines=2, python=python) as notebook:
        notebook.run("import distnb, sys, time, torch\nimport torch.distributed as dist")
        assert notebook.value("sys.modules['IPython'].__version__") == "7.34.0"
        yield notebook


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(python: Path, notebook: Path) -> None:
    command = [PYTHON, "-m", "jupyter", "execute", "--timeout", "300", notebook]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    for _ in range(3):
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if "Address already in use" not in done.stderr:  # another process may take a kernel's port before it does
            break
    assert done.returncode == 0, done.stderr


def test_keras_passes(python: Path) -> None:
    command = [python, "-m", "pytest", "-q", ROOT / "tests" / "keras"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_pictures_replace_the_widget_and_say_so_once(kernel: Notebook) -> None:
    training = "%%distribute mirrored\nfor step in range(4):\n    distnb.live(loss=1 / (1 + step))\n    time.sleep(0.3)"
    ran = kernel.run(training)
    assert "distnb live widget" in ran.stdout
    assert all("application/vnd.jupyter.widget-view+json" not in display for display in ran.displays)
    assert "data:image/" in ran.displays[-1]["text/html"]
    assert "loss: 1 → 0.25" in ran.displays[-1]["text/plain"]
    assert "distnb live widget" not in kernel.run(training).stdout
    kernel.run("%distnb live widget")
    shown = kernel.run(training).displays
    kernel.run("%distnb live auto")
    assert "application/vnd.jupyter.widget-view+json" in shown[0]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("%%distribute mi", "mirrored"),
        ("%distnb sta", "status"),
        ("dist.all_gath", "all_gather"),
    ],
)
def test_words_complete(kernel: Notebook, code: str, expected: str) -> None:
    assert expected in kernel.complete(code)


def test_widgets_of_a_replica_are_text(kernel: Notebook) -> None:
    ran = kernel.run(
        "%%distribute mirrored\nimport ipywidgets\nfrom tqdm.notebook import tqdm\n"
        "for _ in tqdm(range(3)):\n    pass\ndisplay(ipywidgets.IntSlider(7))"
    )
    assert "IntSlider(value=7)" in ran.stdout
    assert "3/3" in ran.stderr


def test_an_error_has_its_line_and_its_notes(kernel: Notebook) -> None:
    failed = kernel.try_run("%%distribute mirrored\ndef half(n):\n    return n / 0\nhalf(1)")
    assert failed.error_name == "ZeroDivisionError"
    assert "----> 3     return n / 0" in failed.traceback
    assert "(replica 1 raised the same)" in failed.traceback
    assert (
        "----> 3     return n / 0"
        in kernel.try_run("%%distribute default\ndef half(n):\n    return n / 0\nhalf(1)").traceback
    )
    noted = kernel.try_run("error = ValueError('no')\nerror.add_note('a note')\nraise error")
    assert "a note" in noted.traceback
    ended = kernel.try_run("%%distribute mirrored\nsys.exit(3)")
    assert (ended.error_name, "SystemExit: 3" in ended.traceback) == ("SystemExit", True)


@pytest.mark.parametrize("magic", ["%%distribute default", "%%distribute mirrored --replicas 1"])
def test_a_breakpoint_stops_in_the_users_line(kernel: Notebook, magic: str) -> None:
    source = f"{magic}\ndef f():\n    inner = 6\n    breakpoint()\n    return inner * 7\nprint(f())"
    ran, _ = kernel.converse(source, "p inner + 1", "w", "c")
    text = ran.check().stdout
    assert "7" in text.splitlines()
    assert "return inner * 7" in text
    assert "42" in text


def test_a_failed_replica_can_be_debugged(kernel: Notebook) -> None:
    kernel.try_run("%%distribute mirrored\nleft = 8 + distnb.replica_id()\n1 / 0")
    debugged, asked = kernel.converse("%debug", "p left", "w", "q")
    assert {prompt.partition(" (")[0] for prompt in asked} <= {"replica 0", "replica 1"}
    assert "1 / 0" in debugged.check().stdout


def test_the_stop_button_ends_a_cell(kernel: Notebook) -> None:
    source = "%%distribute mirrored\nprint('waiting', flush=True)\nwhile True:\n    time.sleep(0.1)"
    message = kernel.start(source)
    kernel.wait_for_output(message, "waiting")
    kernel.interrupt()
    assert kernel.finish(message).error_name == "KeyboardInterrupt"
    assert (
        "sum 2"
        in kernel.run("%%distribute mirrored\none = torch.ones(1)\ndist.all_reduce(one)\nprint('sum', int(one))").stdout
    )


def test_a_killed_engine_ends_the_cell_and_is_replaced(kernel: Notebook) -> None:
    killed = kernel.try_run(
        "%%distribute mirrored\nimport os\nif distnb.replica_id():\n    os.kill(os.getpid(), 9)\ndist.barrier()"
    )
    assert killed.error_name == "EngineDied"
    kernel.run("%distnb restart --missing")
    assert "[0-1] again" in kernel.run("%%distribute mirrored\nprint('again')").stdout


def test_no_output_of_a_short_cell_is_lost(kernel: Notebook) -> None:
    """Check that no output goes to the cell before: the front end's thread still draws that one as this one begins."""
    texts = [kernel.run(f"%%distribute mirrored\nprint('text {number}')").stdout for number in range(60)]
    assert texts == [f"[0-1] text {number}\n" for number in range(60)]
