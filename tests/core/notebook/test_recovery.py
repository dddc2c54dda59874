"""Engines that end unexpectedly: reports to the others, and the state of a replacement."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.support import processes
from tests.support.kernel import Notebook
from tests.support.remote_engines import check_recovery

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with Notebook() as made:
        processes.OF_MODULE.add(made.pid)
        made.run("import os, torch, distnb, distnb.notebook; torch.set_num_threads(1)")
        made.run("%distnb start -n 2", timeout_s=120)
        made.run("cluster = distnb.notebook.compose.current()")
        yield made


@pytest.fixture(autouse=True)
def _module_owns_the_engines(notebook: Notebook) -> Iterator[None]:
    yield
    processes.OF_MODULE.update(notebook.value("[row.pid for row in cluster.status()]"))


def test_training_continues_with_the_remaining_engines_and_with_a_replacement(notebook: Notebook) -> None:
    check_recovery(notebook, 2)


def test_an_object_that_cannot_be_unpickled_is_named_and_affects_no_other(notebook: Notebook) -> None:
    notebook.run("""%%distribute mirrored
import torch.distributed as dist
kept = torch.arange(3.0) + 1
wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
""")
    os.kill(notebook.value("cluster.status()[1].pid"), signal.SIGKILL)
    processes.wait_until(lambda: notebook.value("cluster.status()[1].state") != "idle", 20)
    restarted = notebook.run("%distnb restart --missing", timeout_s=120)
    notebook.run("%%distribute mirrored\nfound = kept.sum().item(), tuple(p.shape[0] for p in model.parameters())")
    assert notebook.value("found") == (6.0, (2, 2)), restarted
    failed = notebook.try_run("%%distribute mirrored\nwrapped(torch.ones(1, 2))")
    assert failed.error_name, "`wrapped` exists on replica 0 only"
    assert "wrapped" in failed.error_text


def test_a_resize_is_shown_and_bad_sizes_are_refused(notebook: Notebook) -> None:
    resized = notebook.run("%distnb resize 1")
    assert resized.stdout.endswith("1 engine removed (1). The cluster has 1 engine now.\n")
    assert notebook.run("%distnb resize 1").stdout == "The cluster has 1 engine already.\n"
    resized = notebook.run("%distnb resize 2", timeout_s=60)
    assert resized.stdout.splitlines() == [
        "distnb: the new replicas do not have `wrapped`, which cannot be copied.",
        "1 engine added (1). The cluster has 2 engines now.",
    ]
    assert resized.displays[0]["text/plain"] == "Starting 1 engine on cpu:1"
    assert len(notebook.run("%distnb status").displays[0]["text/plain"].splitlines()) == 3
    assert "2 replicas" in notebook.run("%%distribute mirrored\ndistnb.live(one=1)").displays[0]["text/plain"]
    for line, text in {
        "": "Give the new number",
        "0": "not a whole number",
        "2 --ps 2": "no parameter servers",
    }.items():
        failed = notebook.try_run(f"%distnb resize {line}")
        assert failed.error_name == "OptionError"
        assert text in failed.error_text


def test_a_replica_that_receives_sigterm_has_not_finished_its_part(notebook: Notebook) -> None:
    ended = notebook.try_run("""%%distribute mirrored
import os, signal
import torch.distributed as dist
while True:
    dist.all_reduce(torch.ones(1))
    if distnb.replica_id() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
""")
    assert ended.error_name == "EngineDied", ended.traceback
    assert "was killed by SIGTERM" in ended.error_text
