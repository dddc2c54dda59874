"""Local modules that are sent to engines which cannot read the notebook's folder: `%distnb start --sync`.

The other machine is a server in a mount namespace of its own, where the folder is empty, one package is missing and
another has a different version.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import processes
from tests.conftest import needs
from tests.kernel import Notebook
from tests.multiprocess.test_server import free_addresses

pytestmark = pytest.mark.timeout(170)

FILES = {
    "shapes/__init__.py": "from .layers import Net",
    "shapes/layers.py": """
import torch
from .parts import factors

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, x):
        import lazily
        return self.linear(x) * factors.FACTOR * lazily.ONE

def fail():
    raise RuntimeError("as asked")  # the line
""",
    "shapes/parts/__init__.py": "",
    "shapes/parts/factors.py": "FACTOR = 2",
    "shapes/words.txt": "one two",
    "lazily.py": "ONE = 1",
}


@dataclass
class Elsewhere:
    """Another machine.

    Attributes:
        folder: The folder of the notebook's modules, which is empty there.
        start: A cell that starts engines there, with a place for more arguments.
    """

    folder: Path
    start: str

    def write(self, place: str, text: str) -> None:
        (self.folder / place).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / place).write_text(text)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    if os.geteuid() != 0:
        pytest.skip("making mount namespaces needs root")
    folder, files = tmp_path_factory.mktemp("modules"), tmp_path_factory.mktemp("server")
    addresses = free_addresses(3)
    (files / "secret").touch(0o600)
    (files / "secret").write_text("s" * 40)
    cluster = {"worker": addresses[:2], "ps": addresses[2:]}
    resolver = f"distnb.cluster_resolver.SimpleClusterResolver({{'worker': {addresses[:2]!r}}})"
    made = Elsewhere(folder, f"cluster = distnb.start(cluster_resolver={resolver}, secret={str(files / 'secret')!r}, per_host=1)")
    started = []
    try:
        for job, index in (("worker", 0), ("worker", 1)):
            task = {"cluster": cluster, "task": {"type": job, "index": index}}
            environment = {**os.environ, "TF_CONFIG": json.dumps(task), "CUDA_VISIBLE_DEVICES": "", "DISTNB_SECRET_FILE": str(files / "secret")}
            script = f"mount -t tmpfs none {folder}; exec {sys.executable} -m distnb.server"
            started.append(subprocess.Popen([needs("unshare"), "--mount", "sh", "-ec", script], env=environment, stdout=subprocess.PIPE, text=True))
        processes.OF_MODULE.update(each.pid for each in started)
        for each in started:
            assert each.stdout is not None
            assert each.stdout.readline().startswith("distnb: waiting for a notebook")
        for place, text in FILES.items():
            made.write(place, text)
        yield made
    finally:
        for each in started:
            each.kill()
            each.wait()
            each.stdout.close()


@pytest.fixture(scope="module")
def notebook(elsewhere: Elsewhere) -> Iterator[Notebook]:
    with Notebook() as made:
        processes.OF_MODULE.add(made.pid)
        made.run(f"import os, sys, torch, distnb; torch.set_num_threads(1); sys.path.insert(0, {str(elsewhere.folder)!r})")
        yield made


def test_explore(elsewhere: Elsewhere, notebook: Notebook) -> None:
    r = notebook.run(elsewhere.start, timeout_s=100)
    print(r.stdout, r.stderr)
    for cell in ["%%distribute mirrored\nimport shapes", "import shapes", "%%distribute mirrored\nnet=shapes.Net()", "net = shapes.Net()", "%%distribute mirrored\nprint(net)", "strategy=distnb.MirroredStrategy()\nstrategy.run(lambda: shapes.Net())", "strategy.run(lambda n: 1, args=(net,))"]:
        r = notebook.try_run(cell)
        print("=====", cell); print(r.error_name, r.error_text); print(r.traceback, r.stdout, r.stderr)
    notebook.run("%distnb stop")
    r = notebook.run(elsewhere.start[:-1] + ", sync=True)", timeout_s=100)
    print(r.stdout, r.stderr)
    for cell in ["%%distribute mirrored\nimport shapes", "%%distribute mirrored\nnet=shapes.Net()\nprint(shapes.__file__, net(torch.ones(2)), sys.path)", "net = shapes.Net()", "%%distribute mirrored\nprint(net)", "strategy=distnb.MirroredStrategy()\nstrategy.run(lambda: shapes.Net())", "strategy.run(lambda n: 1, args=(net,))", "%%distribute mirrored\nshapes.layers.fail()"]:
        r = notebook.try_run(cell)
        print("=====", cell); print(r.error_name, r.error_text); print(r.traceback, r.stdout, r.stderr)
