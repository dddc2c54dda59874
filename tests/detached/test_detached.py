"""Engines that stay when their notebook ends: the next notebook finds everything, and continues with the same numbers."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import psutil
import pytest

from distnb.detached import registry
from distnb.errors import NoClusterError, OptionError
from tests.core.notebook.resize_cases import ADAM, MAKE, STATE, TRAIN, flat, one_replicas
from tests.support import processes
from tests.support.kernel import Notebook, Ran, lines_of_each
from tests.support.machines import Machines, machines

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]

TRAINING = """%%distribute mirrored
import random, torch
torch.manual_seed(5)
random.seed(5)
with strategy.scope():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    metric = distnb.metrics.Mean()
history = []
def step(x):
    optimizer.zero_grad()
    loss = model(x).pow(2).sum()
    loss.backward()
    optimizer.step()
    return loss
"""
STEPS = """%%distribute mirrored
for _ in range(3):
    x = torch.full((2, 4), random.random()) + torch.rand(1)
    loss = strategy.run(step, (x,))
    metric.update_state(loss)
    history.append((float(strategy.reduce("sum", loss, axis=None)), float(metric.result())))
"""
LONG = """%%distribute mirrored
import os, time, torch
with strategy.scope():
    late = torch.nn.Linear(2, 1)
for i in range(20):
    print("line", i, flush=True)
    while i == 3 and not os.path.exists(go_on):
        time.sleep(0.05)
    torch.distributed.barrier()
answer = 42
"""


def _cli(*words: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-m", "distnb", *words], capture_output=True, text=True, timeout=60, check=False
    )
    return ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Start a detached cluster from a notebook that is then killed."""
    with Notebook() as first:
        shown = first.run("%distnb start -n 2 --detach --name exp --hours 0.5", timeout_s=120).text
        assert "%distnb connect exp" in shown
        first.run("import distnb")
        processes.OF_MODULE.update(processes.children_of_this_run())
        _kill(first)
    yield "exp"
    assert "has ended" in _cli("stop", "exp")
    assert "no detached cluster" in _cli("list")


@pytest.fixture
def notebook(cluster: str) -> Iterator[Notebook]:
    with Notebook() as notebook:
        notebook.run("import distnb")
        notebook.run(f"%distnb connect {cluster}")
        yield notebook


def _kill(notebook: Notebook) -> None:
    os.kill(notebook.pid, signal.SIGKILL)
    processes.wait_until(lambda: not _runs(notebook.pid), 10.0, "the kernel still runs")


def _lines(ran: Ran) -> list[str]:
    """Return the lines of the cell `LONG` that both replicas have written, wherever they are shown."""
    return [line.removeprefix("[0-1] ") for line in ran.text.splitlines() if re.fullmatch(r"(\[0-1\] )?line \d+", line)]


def _names(shown: str, *kinds: str) -> set[str]:
    """Return the names that a connection has listed as these kinds."""
    return {
        name for kind in kinds for name in re.findall(r"\w+", "".join(re.findall(f"^{kind}.*?: (.*)$", shown, re.M)))
    }


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _run_until(notebook: Notebook, source: str, text: str) -> str:
    """Start a cell, and wait until it has shown a text. Return the cell's message."""
    message = notebook.start(source)
    for kind, content in notebook.events(message, 60.0):
        if kind == "stream" and text in content["text"]:
            break
    return message


def _kill_in(notebook: Notebook, source: str, text: str, go_on: Path) -> None:
    """Kill a notebook when its cell has shown a text. The cell waits for that, until the file `go_on` exists."""
    notebook.run(f"go_on = {str(go_on)!r}")
    _run_until(notebook, source, text)
    _kill(notebook)
    if go_on.parent.exists():
        go_on.touch()


def test_training_continues_with_the_numbers_of_an_uninterrupted_run(cluster: str, notebook: Notebook) -> None:
    notebook.run(TRAINING)
    for _ in range(2):
        notebook.run(STEPS)
    whole = notebook.value("history")
    notebook.run(TRAINING)
    notebook.run(STEPS)
    notebook.run(
        "strategy = distnb.MirroredStrategy()\nlosses = strategy.run(step, (torch.ones(2, 4),))\nhere = object()"
    )
    losses = notebook.value("[float(each) for each in strategy.local_results(losses)]")
    notebook.run(TRAINING)
    notebook.run(STEPS)
    _kill(notebook)
    with Notebook() as second:
        shown = second.run(f"%distnb connect {cluster}").text
        assert "Mirrored: metric, model, optimizer" in shown
        assert "Per replica: loss, losses" in shown
        assert "Not restored, since their values were in the notebook's process: here" in shown
        assert second.value("[float(each) for each in strategy.local_results(losses)]") == losses
        assert second.value("history") == whole[:3]
        second.run(STEPS)
        assert second.value("history") == whole
        failed = second.try_run("strategy.run(step, (torch.ones(2, 5),))")
        assert "loss = model(x).pow(2).sum()" in failed.traceback, "the line is of a cell of the earlier notebook"
        second.run("%distnb check")


def test_a_running_cell_goes_on_and_its_output_and_names_come(cluster: str, notebook: Notebook, tmp_path: Path) -> None:
    _kill_in(notebook, LONG, "line 3", tmp_path / "go on")
    with Notebook() as second:
        ran = second.run(f"%distnb connect {cluster}")
        assert _lines(ran) == [f"line {i}" for i in range(20)], ran.text
        assert second.value("answer") == 42
        second.run("%%distribute mirrored\nfound = late(torch.ones(1, 2)).shape")
    with Notebook() as third:  # the second one was closed, as by a restart of the kernel
        assert "line" not in third.run(f"%distnb connect {cluster}").stdout
        third.run("%%distribute mirrored\nfound = late(torch.ones(1, 2)).shape")


def test_a_cell_that_fails_without_a_notebook_ends_on_all_replicas(
    cluster: str, notebook: Notebook, tmp_path: Path
) -> None:
    failing = """%%distribute mirrored
import os, time, torch
begun = True
print("begun", flush=True)
while not os.path.exists(go_on):
    time.sleep(0.05)
if distnb.replica_id() == 1:
    raise ValueError("alone")
torch.distributed.barrier()
"""
    _kill_in(notebook, failing, "begun", tmp_path / "go on")
    with Notebook() as second:
        ran = second.run(f"%distnb connect {cluster}")
        assert "failed on replica 1" in ran.stderr
        assert "ValueError: alone" in ran.stderr
        assert second.value("begun") is True
        assert lines_of_each(second.run("%%distribute mirrored\nprint(begun)").stdout, 2) == [["True"]] * 2


def test_one_notebook_at_a_time(cluster: str, notebook: Notebook) -> None:
    notebook.run("%%distribute mirrored\nimport torch\nwith strategy.scope():\n    kept = torch.nn.Linear(2, 1)")
    with Notebook() as other:
        failed = other.try_run(f"%distnb connect {cluster}")
        assert failed.error_name == "ClusterError"
        assert f"(process {notebook.pid} in " in failed.error_text
        assert "--take" in failed.error_text
        other.run(f"%distnb connect {cluster} --take")
        assert "left" in notebook.run("kept").text
        assert notebook.try_run("%distnb interrupt").error_name == "NoClusterError"
        other.run("%%distribute mirrored\nprint(kept.weight.shape)")
        other.run("%distnb disconnect")
        assert "left" in other.run("kept").text
        refused = other.try_run("%%distribute mirrored\n1")
        assert refused.error_name == "NoClusterError", "no engines are started in place of those that it has left"
        assert f"%distnb connect {cluster}" in refused.error_text
    assert "Mirrored: kept" in notebook.run(f"%distnb connect {cluster}").text, "it was bound to a stale handle"
    notebook.run("kept.weight")
    assert "nobody" not in _cli("list")


def test_a_notebook_that_waits_for_a_running_cell_can_be_taken_from(
    cluster: str, notebook: Notebook, tmp_path: Path
) -> None:
    go_on = tmp_path / "go on"
    notebook.run(f"go_on = {str(go_on)!r}")
    _run_until(notebook, LONG, "line 3")
    _kill(notebook)
    with Notebook() as second, Notebook() as third:
        waits = _run_until(second, f"%distnb connect {cluster}", "line 3")
        taken = third.start(f"%distnb connect {cluster} --take")
        refused = second.finish(waits)
        assert refused.error_name == "NoClusterError"
        assert f"process {third.pid} in " in refused.error_text
        go_on.touch()
        assert _lines(third.finish(taken).check()) == [f"line {i}" for i in range(20)]
        assert third.value("answer") == 42


def test_an_engine_that_dies_without_a_notebook_is_replaced(cluster: str, notebook: Notebook) -> None:
    notebook.run("%%distribute mirrored\nimport torch\nwith strategy.scope():\n    kept = torch.nn.Linear(2, 1)")
    before = notebook.value("kept.weight.numpy().tolist()")
    pid = notebook.value("distnb.notebook.compose.require().status()[1].pid")
    _kill(notebook)
    os.kill(pid, signal.SIGKILL)
    with Notebook() as second:
        second.run(f"%distnb connect {cluster}")
        assert "SIGKILL" in second.run("%distnb status").text
        second.run("%distnb restart --missing", timeout_s=90)
        processes.OF_MODULE.update(processes.children_of_this_run())
        weights = second.value("[each.tolist() for each in distnb.MirroredStrategy().local_results(kept.weight)]")
        assert weights == [before, before]


def test_a_cluster_grows_and_shrinks_between_its_notebooks(cluster: str, notebook: Notebook) -> None:
    train = f"%%distribute mirrored\n{TRAIN}{STATE}strategy.assert_in_sync([model, optimizer])\n"
    notebook.run(f"%%distribute mirrored\nimport torch\n{MAKE}{ADAM}")
    notebook.run(train)
    notebook.run("%distnb resize 3", timeout_s=90)
    processes.OF_MODULE.update(processes.children_of_this_run())
    _kill(notebook)
    with Notebook() as second:
        shown = second.run(f"%distnb connect {cluster}").text
        assert "have no" not in shown
        assert {"batches", "count", "mean", "metric", "model", "optimizer"} <= _names(shown, "Mirrored", "Per replica")
        assert {"descend", "found", "losses", "step"} <= _names(shown, "Data, functions and modules")
        assert "3 on cpu:0, cpu:1, cpu:2" in _cli("list")
        second.run(train)
        assert second.value("distnb.MirroredStrategy().num_replicas_in_sync") == 3
        second.run("%distnb resize 1")
        second.run(train)
        _kill(second)
    with Notebook() as third:
        third.run(f"%distnb connect {cluster}")
        third.run("%distnb resize 2", timeout_s=90)  # the first that it does
        processes.OF_MODULE.update(processes.children_of_this_run())
        third.run(train)
        assert third.value("distnb.MirroredStrategy().num_replicas_in_sync") == 2
        assert flat(third.value("found")) == pytest.approx(flat(one_replicas()), abs=1e-5)


def test_a_cell_can_end_with_its_notebook(tmp_path: Path) -> None:
    with Notebook() as first:
        first.run("%distnb start -n 2 --detach --name short --on-disconnect end", timeout_s=120)
        first.run("%%distribute mirrored\nimport torch\nbefore = 1")
        _kill_in(first, LONG, "line 3", tmp_path / "never" / "go on")
    with Notebook() as second:
        failed = second.try_run("%distnb start -n 2 --detach --name short")
        assert "A detached cluster 'short' is running" in failed.error_text
        ran = second.run("%distnb connect short")
        assert "line 19" not in ran.stdout
        assert second.value("before") == 1
        assert second.value("'answer' in dir()") is False
        second.run("%distnb stop")
    assert "no detached cluster" not in _cli("list")


def test_a_cluster_is_taken_from_the_notebook_that_started_it_and_stopped_in_a_terminal() -> None:
    with Notebook() as first, Notebook() as second:
        first.run("%distnb start -n 1 --detach --name mine", timeout_s=120)
        first.run("import distnb, torch\nstrategy = distnb.MirroredStrategy()")
        first.run("%%distribute mirrored\nvaluable = 42")
        second.run("%distnb connect mine --take")
        assert second.value("valuable") == 42
        for program in ("%%distribute mirrored\nvaluable", "strategy.run(lambda: 1)", "%distnb restart"):
            refused = first.try_run(program)
            assert refused.error_name == "NoClusterError", program
            assert "%distnb connect mine --take" in refused.error_text, program
        assert "has taken over" in first.run("%distnb status").text
        assert "No cluster" in first.run("%distnb stop").text

        waits = _run_until(second, "%%distribute mirrored\nprint('begun')\nimport time\ntime.sleep(600)", "begun")
        assert "has ended" in _cli("stop", "mine")
        failed = second.finish(waits)
        assert failed.error_name == "NoClusterError", failed.error_text
        assert "stopped by `distnb stop mine`" in failed.error_text
        assert "restart" not in failed.error_text
        plain = second.run("1 + 1")
        assert "Error" not in plain.text + plain.stderr
        assert "stopped by `distnb stop mine`" in second.try_run("%%distribute mirrored\n1").error_text


def test_the_time_limit_ends_a_cluster() -> None:
    with Notebook() as notebook:
        notebook.run("%distnb start -n 1 --detach --hours 0.003 --name brief", timeout_s=120)
        processes.wait_until(
            lambda: "time limit" in notebook.run("%distnb status").text, 30.0, "the cluster has not reached its limit"
        )
        assert "brief" not in _cli("list")


def test_the_engines_end_with_a_daemon_that_is_killed() -> None:
    with Notebook() as notebook:
        notebook.run("%distnb start -n 1 --detach --name orphan", timeout_s=120)
        daemon = psutil.Process(registry.find("orphan").pid)
        engine = notebook.value("__import__('distnb').notebook.compose.require().status()[0].pid")
        daemon.kill()
        processes.wait_until(lambda: not _runs(engine), 10.0, "the engine still runs")
        ended = "'orphan' has ended: its daemon has ended"
        processes.wait_until(lambda: ended in notebook.run("%distnb status").text, 10.0, "the reason is not shown")
        assert ended in notebook.try_run("%%distribute mirrored\n1").error_text
    assert "orphan" not in _cli("list")


@pytest.mark.parametrize("moment", ["it is listed", "an engine starts"])
def test_a_cluster_ends_if_its_notebook_is_killed_while_it_starts(moment: str) -> None:
    def has_come() -> bool:
        try:
            daemon = psutil.Process(registry.find("early").pid)
        except NoClusterError:
            return False
        return moment == "it is listed" or any("distnb.engine" in each.cmdline() for each in daemon.children())

    with Notebook() as notebook:
        notebook.start("%distnb start -n 1 --detach --name early")
        processes.wait_until(has_come, 60.0, "the cluster does not start")
        daemon = registry.find("early").pid
        _kill(notebook)
        processes.wait_until(lambda: not _runs(daemon), 20.0, "the daemon still runs")
    assert "early" not in _cli("list")


def _add_all(number: int, names: list[str], barrier: Barrier, added: SimpleQueue[str]) -> None:
    """Add a cluster of each name to the registry, at the same time as other processes do."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{folder}/socket")
        listening.listen(1000)
        for name in names:
            entry = registry.Entry(name, socket.gethostname(), number, f"{folder}/socket", time.time())
            barrier.wait()
            with suppress(OptionError):
                added.put(registry.add(entry).name)
        barrier.wait()


def test_of_clusters_that_start_at_once_one_gets_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    names = [f"name-{number}" for number in range(150)]
    forked = multiprocessing.get_context("fork")
    barrier, added = forked.Barrier(4), forked.SimpleQueue()
    adding = [forked.Process(target=_add_all, args=(number, [*names, ""], barrier, added)) for number in range(4)]
    for each in adding:
        each.start()
    found = [added.get() for _ in range(len(names) + 4)]
    for each in adding:
        each.join()
    assert sorted(found) == sorted([*names, *(f"cluster-{number}" for number in range(1, 5))])
    assert added.empty()


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("%distnb start --name exp", "detach=True"),
        ("%distnb start --detach --hours -1", "hours=-1"),
        ("%distnb start --detach --name 'a b'", "64 letters"),
        ("%distnb start --detach --workers 1 --ps 1", "parameter servers"),
        ("%distnb connect nothing", "no detached cluster 'nothing'"),
        ("%distnb disconnect", "No cluster is running"),
    ],
)
def test_invalid_requests_are_errors(line: str, error: str, idle: Notebook) -> None:
    assert error in idle.try_run(line).error_text


@pytest.fixture(scope="module")
def idle() -> Iterator[Notebook]:
    with Notebook() as notebook:
        processes.OF_MODULE.add(notebook.pid)
        yield notebook


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(tmp_path_factory.mktemp("machines"), "red", "blue") as made:
        yield made


def test_engines_on_other_machines_stay(network: Machines, tmp_path: Path) -> None:
    words = " ".join(network.ssh_args)
    (network.hidden / "only_here.py").write_text("ANSWER = 1\n")
    find = f"import sys; sys.path.insert(0, {str(network.hidden)!r})"
    with Notebook() as first:
        first.run(
            f'%distnb start --hosts red,blue --per-host 1 --sync {network.hidden} --ssh-args "{words}" --detach --name afar',
            timeout_s=120,
        )
        first.run(f"import distnb; {find}")
        first.run("%%distribute mirrored\nimport only_here")
        first.run("%%distribute mirrored\nown = distnb.replica_id() + 1")
        _kill_in(first, LONG, "line 3", tmp_path / "go on")
    with Notebook() as second:
        second.run(find)
        ran = second.run("%distnb connect afar")
        assert _lines(ran) == [f"line {i}" for i in range(20)], f"{ran.text}{second.run('%distnb status').text}"
        assert second.value("answer") == 42
        (network.hidden / "only_here.py").write_text("ANSWER = 2\n")
        second.run("import importlib\nimportlib.reload(only_here)")
        second.run("%%distribute mirrored\nfound = importlib.reload(only_here).ANSWER")
        assert second.value("found") == 2
        second.run("""%%distribute mirrored
strategy.assert_in_sync(late)
total = torch.tensor(float(own))
torch.distributed.all_reduce(total)""")
        assert second.value("float(total)") == 3.0
        assert second.value("sorted({row.host for row in distnb.notebook.compose.require().status()})") == [
            "blue",
            "red",
        ]
        assert "not known" in _cli("list")
        second.run("%distnb stop")
