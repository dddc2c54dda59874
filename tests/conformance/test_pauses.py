"""Programs that are interrupted at their second `pause()`: by a resize, a killed engine, engines that end because nobody
uses them, or a checkpoint.

The part before the first pause makes the objects, and `kept` has them by name.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conformance.program import SYNCHRONOUS, all_programs
from tests.conformance.ways import TIME_LIMIT_S, Way, cell_of, judge, named, outcome_of, prepare
from tests.support.kernel import Notebook
from tests.support.processes import OF_MODULE, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(TIME_LIMIT_S)]
PROGRAMS = [program for program in all_programs() if len(program.parts) == 3]
DISTRIBUTED = ("mirrored", "multi_worker", "central_storage", "sharded")


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with Notebook(engines=2) as notebook:
        yield notebook


@pytest.fixture(scope="module")
def larger_notebook() -> Iterator[Notebook]:
    """Provide the notebook of another cluster, so that no test resizes one only to read a checkpoint."""
    with Notebook(engines=3) as notebook:
        OF_MODULE.update(notebook.processes())
        yield notebook


@pytest.fixture(autouse=True)
def _module_owns_the_engines(notebook: Notebook) -> Iterator[None]:
    yield
    OF_MODULE.update(notebook.processes())


def resize(notebook: Notebook, size: int) -> None:
    """Give the notebook a number of engines."""
    notebook.run("import distnb")
    if notebook.value("distnb.MirroredStrategy().num_replicas_in_sync") != size:
        notebook.run(f"%distnb resize {size}")


def interruptions() -> list[object]:
    """Return every (program, way, size after the pause), with the mark `soak` for all but one of each strategy."""
    listed = []
    for number, program in enumerate(PROGRAMS):
        for turn, strategy in enumerate(each for each in DISTRIBUTED if each in program.under):
            for mode_number, mode in enumerate(("cell", "ordinary")):
                for kind, (before, after) in enumerate(((2, 3), (3, 1), (2, 2))):
                    way = Way(strategy, mode, before)
                    chosen = (number + turn) % 2 == mode_number and (number + turn) % 3 == kind
                    listed.append(
                        pytest.param(
                            program.name,
                            way,
                            after,
                            marks=[] if chosen else [pytest.mark.soak],
                            id=f"{program.name}-{way}-{after}",
                        )
                    )
    return listed


@pytest.mark.parametrize(("program", "way", "after"), interruptions())
def test_a_program_continues_on_other_engines(
    notebook: Notebook, tmp_path: Path, program: str, way: Way, after: int
) -> None:
    """Resize, or kill and replace an engine if as many engines continue. Lost shards come from a checkpoint."""
    found = named(program)
    resize(notebook, way.replicas)
    make, train, rest = found.parts
    prepare(notebook, found, way)
    notebook.run(cell_of(found, way, make))
    notebook.run(cell_of(found, way, train))
    folder = str(tmp_path / "saved")
    if after != way.replicas:
        notebook.run(f"%distnb resize {after}")
    else:
        if way.strategy == "sharded":
            notebook.run(cell_of(found, way, f"distnb.Checkpoint(**kept).write({folder!r})"))
        notebook.run("%%distribute mirrored\nimport os\npid = os.getpid()")
        os.kill(notebook.value("pid.values[1]"), signal.SIGKILL)
        notebook.run("%distnb restart --missing")
        if way.strategy == "sharded":
            lost = notebook.try_run(cell_of(found, way, rest))
            assert lost.error_name == "StaleHandleError", lost.traceback
            assert "distnb.Checkpoint(model=model, optimizer=optimizer).restore(path)" in lost.error_text
            notebook.run(cell_of(found, way, f"distnb.Checkpoint(**kept).restore({folder!r})"))
    judge(found, way, outcome_of(notebook, found, cell_of(found, way, rest)))


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["mirrored", "multi_worker", "central_storage"])
@pytest.mark.parametrize("program", [program.name for program in PROGRAMS])
def test_a_program_continues_on_engines_that_nobody_has_used(program: str, strategy: str) -> None:
    found, way = named(program), Way(strategy, "cell", 2)
    make, train, rest = found.parts
    with Notebook() as notebook:
        notebook.run("%distnb start -n 2 --idle-timeout 5s", timeout_s=120)
        prepare(notebook, found, way)
        notebook.run(cell_of(found, way, f"{make}import os\nengine = os.getpid()\n{train}"))
        engines = notebook.value("list(engine.values)")
        wait_until(lambda: not any(map(psutil.pid_exists, engines)), 60)
        notebook.run("%distnb restart", timeout_s=120)
        judge(found, way, outcome_of(notebook, found, cell_of(found, way, rest)))


def transfers() -> list[object]:
    """Return every (program, strategy that saves, strategy that restores), most with the mark `soak`."""
    return [
        pytest.param(
            program.name,
            saves,
            restores,
            marks=[]
            if (number + turn + other) % len(SYNCHRONOUS) == 0 and (number + turn) % 2 == 0
            else [pytest.mark.soak],
            id=f"{program.name}-{saves}-{restores}",
        )
        for number, program in enumerate(PROGRAMS)
        for turn, saves in enumerate(SYNCHRONOUS)
        for other, restores in enumerate(SYNCHRONOUS)
    ]


@pytest.mark.parametrize(("program", "saves", "restores"), transfers())
def test_a_program_continues_under_another_strategy(
    notebook: Notebook, larger_notebook: Notebook, tmp_path: Path, program: str, saves: str, restores: str
) -> None:
    found = named(program)
    make, train, rest = found.parts
    folder = str(tmp_path / "saved")
    resize(notebook, 2)
    way = Way(saves, "cell", 2)
    prepare(notebook, found, way)
    notebook.run(cell_of(found, way, f"{make}{train}distnb.Checkpoint(**kept).write({folder!r})\n"))
    way = Way(restores, "cell", 3)
    prepare(larger_notebook, found, way)
    begin = f"torch.manual_seed(5)\n{make}distnb.Checkpoint(**kept).restore({folder!r})\n"
    larger_notebook.run(cell_of(found, way, begin))
    judge(found, way, outcome_of(larger_notebook, found, cell_of(found, way, rest)))
