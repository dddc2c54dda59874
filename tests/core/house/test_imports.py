"""The cost and side effects of loading a module, each measured in a new interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import distnb
from distnb.errors import UnknownNameError


def loaded_by(*modules: str) -> set[str]:
    """Return what importing some modules loads."""
    code = f"import sys, {', '.join(modules)}\nprint(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_importing_distnb_loads_neither_torch_nor_ipython_and_starts_nothing():
    code = "import distnb, sys, threading, psutil; print(threading.active_count(), len(psutil.Process().children()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["1", "0"]
    assert not {"torch", "IPython", "ipyparallel", "zmq", "numpy", "ipywidgets"} & loaded_by("distnb")


def test_modules_always_loaded_by_the_notebook_do_not_need_torch():
    modules = "errors", "topology", "options", "partitioners", "values", "wire.messages"
    assert "torch" not in loaded_by(*(f"distnb.{module}" for module in modules))


def test_the_engine_side_loads_no_front_end():
    loaded = loaded_by("distnb.engine.agent", "distnb.engine.output.telemetry", "distnb.runtime.spmd")
    assert not {"ipywidgets", "anywidget", "distnb.magics", "distnb.widgets", "distnb.notebook"} & loaded


@pytest.mark.features
@pytest.mark.parametrize("name", distnb.__all__)
def test_every_public_name_loads(name: str):
    assert getattr(distnb, name) is not None
    assert name in dir(distnb)


def test_a_missing_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name") as raised:
        _ = distnb.no_such_name
    assert "did you mean" not in str(raised.value)
    for wrong, right in (("MiroredStrategy", "MirroredStrategy"), ("variable", "Variable"), ("is_cheif", "is_chief")):
        with pytest.raises(UnknownNameError, match=rf"distnb has no attribute '{wrong}' \(did you mean {right}\?\)"):
            getattr(distnb, wrong)


AGAIN = """
import multiprocessing
import os

import distnb

if __name__ == "__main__":
    worker = multiprocessing.get_context("spawn").Process(target=print, args=("the worker",))
    worker.start()
    worker.join()
    raise SystemExit(worker.exitcode)

for again in (distnb.start, distnb.MirroredStrategy):
    os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    try:
        again()
    except RuntimeError as error:
        print(error)
"""


def test_a_script_that_a_process_imports_again_starts_nothing_and_joins_nothing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(AGAIN)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    first, second, last = done.stdout.splitlines()
    assert first.startswith("distnb.start() was reached")
    assert second.startswith("MirroredStrategy() was reached")
    for text in (first, second):
        assert "imports train.py" in text
        assert 'if __name__ == "__main__":' in text
    assert last == "the worker"
