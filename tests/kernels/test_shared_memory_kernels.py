"""Kernels that are forked from one process: they behave like others, and end like others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from jupyter_client.manager import KernelManager

import distnb
from distnb.kernels import provisioner
from distnb.kernels.kernel_spec import KERNEL, PROVISIONER
from tests.support import warm_engines
from tests.support.processes import OF_MODULE, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170), pytest.mark.usefixtures("installed")]

_WITHIN_S = 60.0
_ENGINES = "%load_ext distnb\n%distnb start\nimport os"
_PIDS = "%%distribute mirrored\nimport os\npid = os.getpid()"


def install(folder: Path) -> None:
    """Install the provisioner and the kernel for processes with this folder in their PYTHONPATH and JUPYTER_PATH."""
    metadata = folder / "distnb_kernels-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: distnb-kernels\nVersion: 1\n")
    entry = f"{PROVISIONER} = distnb.kernels.provisioner:SharedMemoryProvisioner"
    (metadata / "entry_points.txt").write_text(f"[jupyter_client.kernel_provisioners]\n{entry}\n")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("kernels")
    install(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm_engines, "real", True)
        patch.syspath_prepend(folder)
        patch.setenv("JUPYTER_DATA_DIR", str(folder))
        patch.setenv("JUPYTER_PATH", str(folder))
        assert KERNEL.run(["--user"]) == 0
        yield folder
    for zygote in provisioner._zygotes.values():
        zygote.close()
    provisioner._zygotes.clear()


@pytest.fixture(autouse=True)
def _zygote_of_module() -> Iterator[None]:
    yield
    OF_MODULE.update(child.pid for child in psutil.Process().children() if "zygote" in " ".join(child.cmdline()))


class Kernel:
    """A kernel and its client."""

    def __init__(self, name: str = "distnb", **settings: Any) -> None:
        self.manager: Any = KernelManager(kernel_name=name)
        self.manager.start_kernel(**settings)
        self.connect()

    def connect(self) -> None:
        self.client: Any = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=_WITHIN_S)

    @property
    def pid(self) -> int:
        return self.manager.provisioner.pid

    def run(self, source: str, error: str = "") -> str:
        """Run a cell, and return its output."""
        texts: list[str] = []

        def collect(message: dict[str, Any]) -> None:
            texts.append(message["content"].get("text", ""))

        reply = self.client.execute_interactive(source, timeout=_WITHIN_S, output_hook=collect)["content"]
        assert reply.get("ename", "") == error, "\n".join(reply.get("traceback", []))
        return "".join(texts)

    def value(self, expression: str) -> Any:
        return json.loads(self.run(f"import json; print(json.dumps({expression}))").splitlines()[-1])

    def engines(self) -> list[int]:
        """Return the processes of its engines, which it starts if there are none."""
        self.run(_ENGINES)
        self.run(_PIDS)
        return self.value("[int(each) for each in pid.values]")

    def end(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    made = Kernel()
    yield made
    made.end()


def ended(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


def test_the_debugger_knows_the_files_of_all_modules(kernel: Kernel) -> None:
    files = kernel.value("get_ipython().kernel._kernel_modules")
    assert {torch.__file__, os.__file__, distnb.__file__} <= {*files}


LOOKS = """
import os, sys, signal, json, torch, multiprocessing, random
print(json.dumps([
    os.getcwd(), os.environ["MINE"], os.environ.get("PYTHONHASHSEED"), sys.argv[0], sys.path, __name__,
    sys.modules["__main__"].__dict__ is globals(), sys.executable, torch.get_num_threads(),
    signal.getsignal(signal.SIGINT) is signal.default_int_handler, os.getppid() == int(os.environ["JPY_PARENT_PID"]),
    os.getpgid(0) == os.getpid(), sys.stdin is None, os.read(0, 1) == b"",
    torch.is_grad_enabled(),
]))
"""


def test_a_forked_kernel_has_the_state_of_one_that_was_started(tmp_path: Path) -> None:
    seen = []
    for name in ("distnb", "python3"):
        path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
        kernel = Kernel(name, cwd=str(tmp_path), env={**os.environ, "MINE": "5", "PYTHONPATH": path})
        forked = type(kernel.manager.provisioner.process) is provisioner.ForkedKernel
        assert forked == (name == "distnb")
        seen.append(json.loads(kernel.run(LOOKS).splitlines()[-1]))
        kernel.end()
    assert seen[0] == seen[1]


def test_kernels_and_engines_are_forked_and_owned_by_their_starters(kernel: Kernel) -> None:
    other = Kernel()
    try:
        engines = kernel.engines() + other.engines()
        assert [psutil.Process(pid).ppid() for pid in engines] == [kernel.pid] * 2 + [other.pid] * 2
        assert psutil.Process(kernel.pid).ppid() == psutil.Process(other.pid).ppid() == os.getpid()
        assert {tuple(psutil.Process(pid).cmdline()[1:3]) for pid in (*engines, kernel.pid)} == {
            ("-c", provisioner._START)
        }
        shared = Path(f"/proc/{engines[0]}/smaps_rollup").read_text()
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in shared.splitlines() if "kB" in line}
        assert sizes["Shared_Dirty"] > 100_000
        assert sizes["Private_Dirty"] < 32_000  # 26,000 were measured
        # Where they share processors, the threads of torch's operators do not spin.
        assert b"OMP_WAIT_POLICY=PASSIVE" in Path(f"/proc/{engines[0]}/environ").read_bytes().split(b"\0")
        draw = "[__import__('random').random(), __import__('numpy').random.rand(), __import__('torch').rand(1).item()]"
        draws = [each.value(draw) for each in (kernel, other)]
        assert not {*draws[0]} & {*draws[1]}
    finally:
        other.end()


def test_an_interrupt_and_a_restart_work_as_in_other_kernels(kernel: Kernel) -> None:
    engines = kernel.engines()
    sent = kernel.client.execute("import time\nprint('sleeping')\ntime.sleep(100)")
    while kernel.client.get_iopub_msg(timeout=_WITHIN_S)["content"].get("text") != "sleeping\n":
        pass
    kernel.manager.interrupt_kernel()
    while (reply := kernel.client.get_shell_msg(timeout=_WITHIN_S))["parent_header"]["msg_id"] != sent:
        pass
    assert reply["content"]["ename"] == "KeyboardInterrupt"
    before = kernel.pid
    kernel.client.stop_channels()
    kernel.manager.restart_kernel()
    kernel.connect()
    assert kernel.pid != before
    wait_until(lambda: ended([before, *engines]), _WITHIN_S)
    assert len(kernel.engines()) == 2


def test_a_killed_kernel_is_noticed_and_leaves_no_process(kernel: Kernel) -> None:
    kernel.engines()
    children = [child.pid for child in psutil.Process(kernel.pid).children(recursive=True)]
    assert len(children) == 4  # its zygote, the guardian, and two engines
    os.kill(kernel.pid, signal.SIGKILL)
    wait_until(lambda: not kernel.manager.is_alive(), _WITHIN_S)
    wait_until(lambda: ended(children), _WITHIN_S)


def test_kernels_outlive_the_processes_that_they_were_forked_from(kernel: Kernel) -> None:
    own = next(child for child in psutil.Process(kernel.pid).children())  # before any other child
    others = {child.pid for child in psutil.Process().children()} - {kernel.pid}
    zygote = next(pid for pid in others if "zygote" in " ".join(psutil.Process(pid).cmdline()))
    os.kill(zygote, signal.SIGKILL)
    os.kill(own.pid, signal.SIGKILL)
    assert len(kernel.engines()) == 2  # from a template that was started as usual
    other = Kernel()
    assert other.value("6 * 7") == 42
    other.end()


SERVER = """
import os, signal, sys, json
from tests.kernels.test_shared_memory_kernels import Kernel
kernel = Kernel()
kernel.engines()
import psutil
print(json.dumps([child.pid for child in psutil.Process().children(recursive=True)]), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_server_leaves_no_process(installed: Path, tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(installed), root)), "TMPDIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", SERVER], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    assert run.returncode == -signal.SIGKILL
    pids = json.loads(run.stdout.splitlines()[-1])
    assert len(pids) == 6  # the kernel, what it started, and the process that it was forked from
    wait_until(lambda: ended(pids), _WITHIN_S)
