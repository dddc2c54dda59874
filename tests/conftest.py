"""Rules for every test: a hard limit that shows all stacks, and no leftovers.

- A test that runs into its limit (`@pytest.mark.timeout(seconds)`, 180 s by default) fails with the stacks of this
  process and of every process that it started, taken *before* anything is torn down. If the main thread is in C code
  that lets no signal handler run, the whole run ends some seconds later, since the alternative is a hang.
- After each test, no new process, listening port or temporary file may exist. What a fixture of a wider scope started
  is checked when its module ends.
- `needs("chromium")` skips a test if a program is missing. With CI=true it fails instead.
"""

from __future__ import annotations

import compileall
import faulthandler
import gc
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

from tests.support import processes, warm_base, warm_engines, warm_python
from tests.support.kernel import Notebook, Shared

# -- a separate folder for the files of a run -------------------------------------------------------------------------

# Set before tempfile's cached directory, jupyter_core or IPython is imported. The path is short, because it contains UNIX
# sockets. So a worker's directory is not inside that of the process that started it.
_ROOT = Path(tempfile.mkdtemp(prefix="dnb-", dir=os.environ.setdefault("DISTNB_TEST_ROOTS", tempfile.gettempdir())))
_FOLDERS = {"TMPDIR": "tmp", "IPYTHONDIR": "ipython", "JUPYTER_RUNTIME_DIR": "run", "XDG_STATE_HOME": "state"}
for _name, _folder in _FOLDERS.items():
    (_ROOT / _folder).mkdir()
    os.environ[_name] = str(_ROOT / _folder)
tempfile.tempdir = None
# A test may count on two cores only, and replicas share them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("KERAS_BACKEND", "torch")
# The state machines check their invariants after each transition, in every process that a test starts.
os.environ.setdefault("DISTNB_VALIDATE", "1")

# Since Python 3.14 a loader's workers are forked only on request. Otherwise each loads torch, which takes seconds.
multiprocessing.set_start_method("fork", force=True)

# With `&` in a script, or under nohup, these signals are ignored, and would be in all processes of the tests.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _ignored in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(_ignored, signal.SIG_DFL)

# Without byte code (PYTHONDONTWRITEBYTECODE), each of about a thousand processes would compile the package, and each
# worker would rewrite the assertions of all tests.
sys.dont_write_bytecode = False
if "PYTEST_XDIST_WORKER" not in os.environ:
    compileall.compile_dir(Path(__file__).parents[1] / "distnb", quiet=2)

_KEPT = ("pytest-of-", "torchinductor_")  # pytest's tmp_path, and torch.compile's cache


def pytest_configure(config: pytest.Config) -> None:
    if "not soak" not in config.option.markexpr:
        warm_python.hash_seeds = 2


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files that start processes first: they take longest, and workers would wait for a last one."""
    items.sort(key=lambda item: item.get_closest_marker("processes") is None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Divide the conformance suite, which has nearly all tests of a soak, by strategy and number of replicas."""
    if config.option.dist != "loadfile" or "not soak" in config.option.markexpr:
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            way = re.match(r"tests/conformance/.*-(\w+-(?:cell|ordinary|script)-\d)", nodeid)
            return f"{super()._split_scope(nodeid)} {way[1]}" if way else super()._split_scope(nodeid)

    return Scheduling(config, log)


def pytest_unconfigure(config: pytest.Config) -> None:
    warm_python.close()
    warm_engines.close()
    warm_base.close()
    remove_folders()


def remove_folders() -> None:
    """Remove the files of this run."""
    shutil.rmtree(_ROOT, ignore_errors=True)


warm_engines.patch()
warm_engines.patch_kernels()

# -- limits -----------------------------------------------------------------------------------------------------------

_REAL_STDERR = os.fdopen(os.dup(2), "w")
_GRACE_S = 60.0


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Replace pytest-timeout's own timer."""

    def strike(number: int, frame: FrameType | None) -> None:
        shown = [*processes.children_of_this_run(), *processes.marked(processes.SHARED_MARK)]
        text = processes.stacks([os.getpid(), *shown])
        print(f"\n~~~ {item.nodeid}: the stacks after {settings.timeout:g} s ~~~\n{text}", file=sys.stderr)
        pytest.fail(f"Timeout: not done within {settings.timeout:g} s (every process's stacks are in stderr)")

    signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout)
    faulthandler.dump_traceback_later(settings.timeout + _GRACE_S, exit=True, file=_REAL_STDERR)
    return True


def pytest_timeout_cancel_timer(item: pytest.Item) -> bool:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    faulthandler.cancel_dump_traceback_later()
    return True


# -- leaks ------------------------------------------------------------------------------------------------------------

_GONE_WITHIN_S = float(os.environ.get("DISTNB_TEST_GONE_WITHIN_S", "10"))


class _Before:
    """The processes, ports and files before a test, for comparison."""

    def __init__(self) -> None:
        self.pids = set(processes.children_of_this_run())
        self.ports = processes.listening_ports()
        self.files = _files()

    def new(self, *, ignore_offspring: bool) -> list[psutil.Process]:
        """Return the processes that are new."""
        new = [p for pid, p in processes.children_of_this_run().items() if pid not in self.pids]
        if not ignore_offspring:
            return new
        of_others = self.pids | processes.OF_MODULE
        return [p for p in new if not ({p.pid} | processes.ancestors(p)) & of_others]

    def left(self, *, ignore_offspring: bool) -> list[str]:
        """Return everything that is new, in words."""
        left = [f"process {processes.describe(p)}" for p in self.new(ignore_offspring=ignore_offspring)]
        if not (ignore_offspring and (self.pids or processes.OF_MODULE)):  # a cluster of the module has its own
            left += [f"listening port {host}:{port}" for host, port in processes.listening_ports() - self.ports]
            left += [f"file {path}" for path in sorted(_files() - self.files)]
        return left

    def check(self, whose: str, *, ignore_offspring: bool) -> None:
        """Fail if anything is left. Processes get the time that the product promises to need at most."""
        deadline = time.monotonic() + _GONE_WITHIN_S
        while True:
            late = time.monotonic() > deadline  # read first, because this process may be suspended in between
            left = self.left(ignore_offspring=ignore_offspring)
            if not left:
                return
            if late:
                for process in self.new(ignore_offspring=ignore_offspring):
                    process.kill()  # not to spoil the next test
                pytest.fail(f"{whose} left behind:\n  " + "\n  ".join(left))
            gc.collect()  # sockets close when the last reference goes, and tracebacks hold some
            time.sleep(0.02)


def _files() -> set[str]:
    found = {str(p) for p in (_ROOT / "tmp").iterdir() if not p.name.startswith(_KEPT)}
    found |= {str(p) for p in (_ROOT / "run").iterdir()}
    security = _ROOT / "ipython" / "profile_default" / "security"
    found |= {str(p) for p in security.glob("*")}
    return found


_SHARED_MEMORY = {str(p) for p in Path("/dev/shm").iterdir()}


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Check once per run, since all workers see these files; only in CI, where no other program uses the machine."""
    if os.environ.get("CI") == "true" and not hasattr(session.config, "workerinput"):
        left = {str(p) for p in Path("/dev/shm").iterdir()} - _SHARED_MEMORY
        if left:
            print("The tests left behind:", *sorted(left), file=sys.stderr)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="module", autouse=True)
def _module_leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    gc.collect()
    gc.freeze()  # its tests collect garbage again and again, and no object so far is garbage: most are of libraries
    before = _Before()
    yield
    processes.OF_MODULE.clear()
    _forget_the_notebook()
    before.check(request.node.nodeid, ignore_offspring=False)


def _forget_the_notebook() -> None:
    """Undo the effects of a cluster of the module, which made a notebook of this process and has ended."""
    module = sys.modules.get("distnb.runtime.this_process")
    if module is not None:
        module.this_process.remote = None


@pytest.fixture(autouse=True)
def _test_leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    before = _Before()
    yield
    before.check(request.node.nodeid, ignore_offspring=True)


# -- shared fixtures --------------------------------------------------------------------------------------------------


@pytest.fixture
def real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start engines and kernels without a zygote."""
    monkeypatch.setattr(warm_engines, "real", True)


@pytest.fixture(scope="session")
def shared() -> Iterator[Shared]:
    """Provide the notebook that modules share."""
    (_ROOT / "shared").mkdir()
    shared = Shared(_ROOT / "shared")
    yield shared
    shared.close()

    def left() -> list[str]:
        found = [processes.describe(process) for process in processes.marked(processes.SHARED_MARK).values()]
        return found + [path.name for path in (_ROOT / "shared").iterdir() if not path.name.startswith(_KEPT)]

    processes.wait_until(lambda: not left(), _GONE_WITHIN_S, f"the shared notebook has left {left()}")


@pytest.fixture(scope="module")
def notebook(shared: Shared) -> Iterator[Notebook]:
    """Provide a notebook with two engines and no names.

    Tests that end engines, or need another environment, make their own.
    """
    yield shared.take()
    shared.clear()


# -- system packages --------------------------------------------------------------------------------------------------


def needs(program: str) -> str:
    """Return the path of a program that a test needs. If it is missing, skip the test, or fail in CI."""
    path = shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")
    if path is None:
        reason = f"{program} is not installed on this machine"
        if os.environ.get("CI") == "true":
            pytest.fail(reason + ", and CI must have it")
        pytest.skip(reason)
    return path
