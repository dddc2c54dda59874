"""Folders of modules that are sent to engines which cannot read them: `%distnb start --sync`.

Other machines are servers in a mount namespace, where the folder is empty, one package is missing, and another has a
different version.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import needs
from tests.servers.test_server import free_addresses
from tests.support import processes
from tests.support.kernel import Notebook

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]

FILES = {
    "shapes/__init__.py": "from .layers import Net, SGD",
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

class SGD(torch.optim.SGD):
    pass

def fail():
    raise RuntimeError("as asked")  # in layers
""",
    "shapes/parts/__init__.py": "",
    "shapes/parts/factors.py": "FACTOR = 2\n",
    "shapes/words.txt": "one two",
    "lazily.py": "ONE = 1\n",
    "numbers_of.py": """
from dataclasses import dataclass

@dataclass
class Point:
    x: int

class Squares:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        from only_there import square
        return square(index)

def twice(number):
    return 2 * number
""",
    "only_there.py": "def square(number):\n    return number**2\n",
    "in_a_function.py": "ANSWER = 42\n",
    "for_closures.py": "class Work:\n    def __init__(self, number):\n        self.number = number\n",
    "in_a_closure.py": "def square(number):\n    return number**2\n",
}


@dataclass
class Elsewhere:
    """Other machines.

    Attributes:
        folder: The folder of the notebook's modules, which is empty there.
        addresses: The addresses of the servers: two workers and a parameter server.
        secret: The servers' secret file.
    """

    folder: Path
    addresses: list[str]
    secret: Path

    def start(self, workers: int, ps: int, *words: str) -> str:
        """Return a cell that starts engines there."""
        cluster = {"worker": self.addresses[:workers]} | ({"ps": self.addresses[2 : 2 + ps]} if ps else {})
        return (
            f"resolver = distnb.cluster_resolver.SimpleClusterResolver({cluster})\n"
            f"%distnb start --resolver resolver --secret {self.secret} {' '.join(words)}\n"
            "cluster = distnb.notebook.compose.current()"
        )

    def write(self, place: str, text: str) -> None:
        (self.folder / place).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / place).write_text(text)


def _script(folder: Path, metadata: Path) -> str:
    """Return the shell commands that make a machine of a mount namespace, and start a server there."""
    site = Path(sysconfig.get_path("purelib"))
    hidden = [folder, site / "tabulate", *site.glob("tabulate-*.dist-info")]
    (changed,) = site.glob("tomlkit-*.dist-info")
    metadata.write_text("Metadata-Version: 2.1\nName: tomlkit\nVersion: 0.0.1\n")
    mounts = [f"mount -t tmpfs none {each}" for each in hidden]
    mounts.append(f"mount --bind {metadata} {changed / 'METADATA'}")
    return "; ".join([*mounts, f"exec {sys.executable} -m distnb.server"])


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    if os.geteuid() != 0:
        pytest.skip("making mount namespaces needs root")
    for program in ("unshare", "mount"):
        needs(program)
    files = tmp_path_factory.mktemp("servers")
    made = Elsewhere(tmp_path_factory.mktemp("modules"), free_addresses(3), files / "secret")
    made.secret.touch(0o600)
    made.secret.write_text("s" * 40)
    for place, text in FILES.items():
        made.write(place, text)
    script = _script(made.folder, files / "METADATA")
    cluster = {"worker": made.addresses[:2], "ps": made.addresses[2:]}
    started = []
    try:
        for job, index in (("worker", 0), ("worker", 1), ("ps", 0)):
            environment = {
                **os.environ,
                "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}}),
                "CUDA_VISIBLE_DEVICES": "",
                "DISTNB_SECRET_FILE": str(made.secret),
            }
            command = ["unshare", "--mount", "sh", "-ec", script]
            started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        processes.OF_MODULE.update(each.pid for each in started)
        for each in started:
            assert each.stdout is not None
            assert each.stdout.readline().startswith("distnb: waiting for a notebook")
        yield made
    finally:
        for each in started:
            each.kill()
            each.wait()
            assert each.stdout is not None
            each.stdout.close()


@pytest.fixture(scope="module")
def notebook(elsewhere: Elsewhere) -> Iterator[Notebook]:
    with Notebook() as made:
        processes.OF_MODULE.add(made.pid)
        made.run(
            "import os, sys, torch, distnb, distnb.notebook.compose, tabulate; torch.set_num_threads(1)\n"
            f"sys.path.insert(0, {str(elsewhere.folder)!r})"
        )
        yield made


def test_an_error_without_modules_there_shows_the_cure(elsewhere: Elsewhere, notebook: Notebook) -> None:
    ran = notebook.run(elsewhere.start(1, 0, "--per-host 1"), timeout_s=100)
    assert f"distnb: engine 0 on {elsewhere.addresses[0]} has no tabulate, this notebook has" in ran.stderr
    assert "pip install tabulate==" in ran.stderr
    failed = notebook.try_run("%%distribute mirrored\nimport shapes")
    assert failed.error_name == "ModuleNotFoundError"
    path = elsewhere.folder / "shapes/__init__.py"
    assert f"(shapes is a local module of this notebook: {path}. Start the engines with --sync" in failed.traceback
    notebook.run("import numbers_of")
    failed = notebook.try_run("%%distribute mirrored\nnumbers_of.twice(3)")
    assert failed.error_name == "CannotTravelError"
    assert "--sync" in failed.error_text
    notebook.run("point = numbers_of.Point(1)")
    failed = notebook.try_run("%%distribute mirrored\npoint.x")
    assert failed.error_name == "CannotTravelError"
    assert "--sync" in failed.error_text
    notebook.run("%distnb stop", timeout_s=30)


def test_a_cell_imports_a_package_that_only_the_notebook_has(elsewhere: Elsewhere, notebook: Notebook) -> None:
    ran = notebook.run(elsewhere.start(2, 1, f"--sync {elsewhere.folder}"), timeout_s=120)
    assert ran.stderr.count("has no tabulate") == 3
    assert "tomlkit" not in ran.stderr
    ran = notebook.run("""%%distribute mirrored
import importlib.resources, inspect
import shapes
with strategy.scope():
    net = shapes.Net()
    torch.nn.init.ones_(net.linear.weight), torch.nn.init.zeros_(net.linear.bias)
result = net(torch.ones(1, 2)).item()
words = importlib.resources.files("shapes").joinpath("words.txt").read_text()
text = inspect.getsource(shapes.layers.fail).splitlines()[-1].strip()
folder = os.path.dirname(os.path.dirname(shapes.__file__))
mode = os.stat(os.path.dirname(folder)).st_mode
""")
    assert notebook.value("[result, words, text]") == [4.0, "one two", 'raise RuntimeError("as asked")  # in layers']
    assert stat.S_IMODE(notebook.value("mode")) == 0o700
    folders = notebook.value("strategy.local_results(folder)")
    assert all(Path(each).parent.name == f"folders-{engine}" for engine, each in enumerate(folders))
    assert notebook.value("shapes.__file__") == str(elsewhere.folder / "shapes/__init__.py")
    assert str(elsewhere.folder) in notebook.value("sys.path")
    assert not set(folders) & set(notebook.value("sys.path"))


def test_a_package_of_another_version_is_reported_once(notebook: Notebook) -> None:
    ran = notebook.run("%%distribute mirrored\ndef read(text):\n    import tomlkit\n    return tomlkit.parse(text)")
    assert ran.stderr.count("has tomlkit 0.0.1, this notebook has ") == 3
    ran = notebook.run("%%distribute mirrored\nimport tomlkit")
    assert "tomlkit" not in ran.stderr


def test_objects_of_local_classes_travel_and_are_pickled_by_name(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run("import numbers_of\npoint = numbers_of.Point(1)")
    notebook.run(f"""%%distribute mirrored
import pickle
point.x += 1
made = pickle.loads(pickle.dumps(numbers_of.Point(3)))
if distnb.is_chief():
    torch.save(shapes.Net(), {str(tmp_path / "net.pt")!r})
""")
    assert notebook.value("[point.x, made.x, type(made) is numbers_of.Point]") == [2, 3, True]
    notebook.run(f"loaded = torch.load({str(tmp_path / 'net.pt')!r}, weights_only=False)")
    assert notebook.value("type(loaded) is shapes.Net")


def test_a_module_that_only_a_function_of_the_notebook_imports_is_sent(notebook: Notebook) -> None:
    notebook.run("def answer():\n    from in_a_function import ANSWER\n    return ANSWER")
    notebook.run("strategy = distnb.MirroredStrategy()\nfound = strategy.run(answer)")
    assert notebook.value("[found, 'in_a_function' in sys.modules]") == [42, False]


def test_an_edited_file_is_sent_and_reloaded(elsewhere: Elsewhere, notebook: Notebook) -> None:
    times = "%%distribute mirrored\ntimes = [os.stat(f.__file__).st_mtime_ns for f in (shapes.parts.factors, shapes.layers)]"
    notebook.run(times)
    before = notebook.value("strategy.local_results(times)")
    for factor in (3, 4):  # of one size
        elsewhere.write("shapes/parts/factors.py", f"FACTOR = {factor}\n")
        notebook.run("import importlib; importlib.reload(shapes.parts.factors)")
        notebook.run("%%distribute mirrored\nresult = net(torch.ones(1, 2)).item()")
        assert notebook.value("result") == 2.0 * factor
    notebook.run(times)
    after = notebook.value("strategy.local_results(times)")
    for replica in range(2):
        assert before[replica][0] < after[replica][0]
        assert before[replica][1] == after[replica][1], "a file that did not change was sent again"


def test_workers_of_a_loader_and_spawned_processes_have_the_modules(notebook: Notebook) -> None:
    notebook.run("""%%distribute mirrored
import multiprocessing
loader = torch.utils.data.DataLoader(numbers_of.Squares(), batch_size=2, num_workers=1, multiprocessing_context="fork")
batches = [batch.tolist() for batch in loader]
""")
    assert notebook.value("batches") == [[0, 1], [4, 9]]
    ran = notebook.run("""%%distribute mirrored --replicas 0
with multiprocessing.get_context("spawn").Pool(1) as pool:
    print(pool.apply(numbers_of.twice, (21,)))
""")
    assert "42" in ran.stdout


def test_an_errors_traceback_shows_the_notebooks_file(elsewhere: Elsewhere, notebook: Notebook) -> None:
    failed = notebook.try_run("%%distribute mirrored\nshapes.layers.fail()")
    assert failed.error_name == "RuntimeError"
    assert f"File {elsewhere.folder}/shapes/layers.py:18, in fail()" in failed.traceback
    assert '---> 18     raise RuntimeError("as asked")' in failed.traceback
    assert "folders-0" not in failed.traceback


def test_closures_and_parameter_servers_have_the_modules(notebook: Notebook) -> None:
    notebook.run("""
import for_closures
servers = distnb.ParameterServerStrategy()
coordinator = distnb.coordinator.ClusterCoordinator(servers)
with servers.scope():
    model = shapes.Net()
    optimizer = shapes.SGD(model.parameters(), lr=0.5)

def step(work):
    import in_a_closure
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return in_a_closure.square(work.number)
""")
    before = notebook.value("model.linear.bias.item()")
    notebook.run(
        "results = [coordinator.schedule(step, args=(for_closures.Work(n),)) for n in (2, 3)]\ncoordinator.join()"
    )
    assert notebook.value("coordinator.fetch(results)") == [4, 9]
    assert notebook.value("model.linear.bias.item()") == pytest.approx(before - 2 * 0.5 * 4)


def test_a_replaced_engine_gets_the_modules(notebook: Notebook) -> None:
    os.kill(notebook.value("cluster.status()[1].pid"), signal.SIGKILL)
    processes.wait_until(lambda: notebook.value("cluster.status()[1].state") != "idle", 20, "no end is noticed")
    notebook.run("%distnb restart --missing", timeout_s=100)
    notebook.run("""%%distribute mirrored
result, same = net(torch.ones(1, 2)).item(), type(net) is shapes.Net
batches = [batch.tolist() for batch in torch.utils.data.DataLoader(numbers_of.Squares(), batch_size=4)]
""")
    assert notebook.value("[result, same, batches]") == [8.0, True, [[0, 1, 4, 9]]]
    assert notebook.value("coordinator.fetch(coordinator.schedule(step, args=(for_closures.Work(5),)))") == 25


def test_a_new_file_is_sent_before_the_next_cell(elsewhere: Elsewhere, notebook: Notebook) -> None:
    elsewhere.write("by_name.py", "NAME = 'new'\n")
    notebook.run("%%distribute mirrored\nimport importlib\nfound = importlib.import_module('by_' + 'name').NAME")
    assert notebook.value("found") == "new"


def test_a_module_in_another_folder_has_a_cure(notebook: Notebook, tmp_path: Path) -> None:
    (tmp_path / "in_another_folder.py").touch()
    folder = str(tmp_path)
    notebook.run(f"sys.path.append({folder!r})\nimport in_another_folder\nsys.path.remove({folder!r})")
    failed = notebook.try_run("%%distribute mirrored\nimport in_another_folder")
    assert failed.error_name == "ModuleNotFoundError"
    assert "It is not in a folder that --sync sends" in failed.traceback


def test_the_files_end_with_the_engines(notebook: Notebook) -> None:
    folders = notebook.value("strategy.local_results(folder)")
    assert all(map(os.path.isdir, folders[:1]))
    notebook.run("%distnb stop", timeout_s=30)
    processes.wait_until(lambda: not any(map(os.path.exists, folders)), 20, "files are left")
