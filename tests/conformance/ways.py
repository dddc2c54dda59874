"""The ways to run a program: strategies × modes × numbers of replicas, and the part of them that `make test` runs."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.plain import reference
from tests.conformance.prelude import TEXT
from tests.conformance.program import Program, all_programs
from tests.support.kernel import Notebook
from tests.support.ranks import run_ranks
from tests.support.tasks import Tasks

TIME_LIMIT_S = 170.0

CLASSES = {
    "one_device": "OneDeviceStrategy",
    "mirrored": "MirroredStrategy",
    "multi_worker": "MultiWorkerMirroredStrategy",
    "central_storage": "CentralStorageStrategy",
    "sharded": "ShardedStrategy",
    "parameter_server": "ParameterServerStrategy",
}
ALONE = ("default", "one_device")


@dataclass(frozen=True)
class Way:
    """A way to run a program."""

    strategy: str
    mode: str
    replicas: int

    def __str__(self) -> str:
        return f"{self.strategy}-{self.mode}-{self.replicas}"

    def made(self, program: Program) -> str:
        """Return the expression that makes the strategy."""
        if self.strategy == "default":
            return "distnb.get_strategy()"
        options = {} if self.strategy in ALONE else program.options
        given = ["'cpu:0'"] if self.strategy == "one_device" else []
        return f"distnb.{CLASSES[self.strategy]}({', '.join([*given, *(f'{k}={v}' for k, v in options.items())])})"

    def assigned(self, program: Program) -> str:
        """Return the statements that a `%%distribute` cell saves."""
        if self.strategy != "parameter_server":
            return f"strategy = {self.made(program)}"
        return f"strategy = {self.made(program)}\ncoordinator = distnb.coordinator.ClusterCoordinator(strategy)"

    @property
    def engines(self) -> str:
        """The arguments of `%distnb start` in a notebook, where replicas of parameter servers are workers."""
        servers = self.strategy == "parameter_server"
        return f"--workers {self.replicas} --ps 2" if servers else f"-n {self.replicas}"


def ways_of(program: Program) -> list[Way]:
    """Return all ways of a program."""
    return [
        Way(strategy, mode, replicas)
        for strategy in program.under
        for mode in program.modes
        for replicas in ((1,) if strategy in ALONE else program.replicas)
    ]


def covering(program: Program, number: int) -> set[Way]:
    """Return the ways that `make test` runs: neighbouring strategies, in a mode and with replicas that differ by program.

    A case of a program with many cases runs under fewer strategies, and only under those with several replicas.
    """
    chosen = set()
    for turn, strategy in enumerate(program.under):
        is_sampled = (turn - number) % len(program.under) < program.samples
        if not is_sampled or (program.has_many_cases and strategy in ALONE):
            continue
        ways = [way for way in ways_of(program) if way.strategy == strategy]
        several = [way for way in ways if way.replicas > 1] or ways
        chosen.add(several[(number + turn) % len(several)])
    return chosen


def cases(*modes: str) -> list[Any]:
    """Return every (engines, program, way) of some modes, with the mark `soak` where the covering ways are enough."""
    listed = []
    for number, program in enumerate(all_programs()):
        default = covering(program, number)
        for way in ways_of(program):
            if way.mode in modes:
                marks = [] if way in default else [pytest.mark.soak]
                values = (way.engines, program.name, way)
                listed.append(pytest.param(*values, marks=marks, id=f"{program.name}-{way}"))
    return sorted(listed, key=lambda case: str(case.values[0]))  # each cluster starts once


def named(name: str) -> Program:
    """Return a program."""
    return next(program for program in all_programs() if program.name == name)


# -- outcomes ---------------------------------------------------------------------------------------------------------


def judge(program: Program, way: Way, outcome: dict[str, Any]) -> None:
    """Check that an outcome is right, or the error that the program lists. There is no third state.

    Args:
        outcome: `{"result": …}` or `{"error": class name, "traceback": …}`.
    """
    refusal = program.refusal(way.strategy, way.mode, way.replicas)
    if refusal is not None:
        refusal.check_documented()
        assert "error" in outcome, f"{refusal.error} was expected; the result was {outcome['result']}"
        assert outcome["error"] == refusal.error, outcome["traceback"]
        return
    assert "error" not in outcome, outcome["traceback"]
    same(outcome["result"], reference(program.name, way.replicas), program.tolerance)


def same(got: Any, expected: Any, tolerance: float, where: str = "result") -> None:
    """Check that two structures are equal, with numbers equal up to rounding."""
    numbers, wanted = _flat(got), _flat(expected)
    if wanted and all(isinstance(value, float) for value in wanted):
        assert _shape(got) == _shape(expected), f"{where}: {got} instead of {expected}"
        scale = max([abs(value) for value in wanted if value == value] + [1e-3])
        for one, other in zip(numbers, wanted, strict=True):
            equal = one == other or (one != one and other != other) or abs(one - other) <= tolerance * scale
            assert equal, f"{where}: {got} instead of {expected}"
    elif isinstance(expected, dict):
        assert sorted(got) == sorted(expected), f"{where}: {got} instead of {expected}"
        for key, value in expected.items():
            same(got[key], value, tolerance, f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), f"{where}: {got} instead of {expected}"
        for index, value in enumerate(expected):
            same(got[index], value, tolerance, f"{where}[{index}]")
    else:
        assert got == expected, f"{where}: {got} instead of {expected}"


def _flat(value: Any) -> list[Any]:
    return [leaf for each in value for leaf in _flat(each)] if isinstance(value, list | tuple) else [value]


def _shape(value: Any) -> Any:
    return [_shape(each) for each in value] if isinstance(value, list | tuple) else None


# -- notebooks --------------------------------------------------------------------------------------------------------

_BEGIN = "import json, torch\ntorch.manual_seed(0)\ntorch.set_default_dtype(torch.{dtype})\n{text}"


def prepare(notebook: Notebook, program: Program, way: Way) -> None:
    """Define what a program's cells use."""
    constants = "".join(f"{name} = {value!r}\n" for name, value in program.constants.items())
    chosen = f"chosen = {way.made(program)}\n" if program.options else ""
    notebook.run(_BEGIN.format(dtype=program.dtype, text=f"{TEXT}\n{program.module}\n{constants}{chosen}"))


def cell_of(program: Program, way: Way, text: str) -> str:
    """Return the cell that runs a text of the program."""
    if way.mode == "ordinary":
        return f"{way.assigned(program)}\n{text}"
    return f"%%distribute {'chosen' if program.options else way.strategy}\n{text}"


def outcome_of(notebook: Notebook, program: Program, cell: str) -> dict[str, Any]:
    """Run a cell that assigns `result`, and return its outcome."""
    ran = notebook.try_run(cell, timeout_s=100)
    if ran.status == "error":
        return {"error": ran.error_name, "traceback": f"{ran.source}\n{ran.traceback}"}
    assert program.notices in ran.stderr if program.notices else not ran.stderr, ran.stderr
    shown = notebook.try_run("print(json.dumps(result))")
    assert shown.status == "ok", f"{shown.error_name}: {shown.error_text}\n{notebook.run('print(result)').stdout}"
    return {"result": json.loads(shown.stdout)}


# -- scripts ----------------------------------------------------------------------------------------------------------

# Starting processes costs more than a program, so those of one strategy share them. An error that ends the program on
# all replicas also ends the processes' use: the next scope raises ProgramAborted, and the others get new processes.
_DRIVER = """
import gc, json, os, runpy, traceback
import torch
import distnb
from distnb.errors import ProgramAborted

{start}
with open(os.path.join({folder!r}, str(os.getpid())), "w") as file:
    for number, (path, dtype) in enumerate({programs!r}):
        torch.manual_seed(0)
        torch.set_default_dtype(getattr(torch, dtype))
        try:
            outcome = {{"result": runpy.run_path(path, run_name="__main__")["result"]}}
        except Exception as error:
            outcome = {{"error": type(error).__name__, "traceback": traceback.format_exc()}}
        except ProgramAborted as error:
            if number:
                break
            outcome = {{"error": type(error).__name__, "traceback": traceback.format_exc()}}
        file.write(json.dumps([path, outcome]) + chr(10))
        file.flush()
        outcome = None
        gc.collect()
    file.write(json.dumps(["end", None]) + chr(10))
{stop}
"""
# The process has loaded torch, so engines that are forked from it start in milliseconds.
_START_SERVERS = """
from distnb.cluster.local import zygote
zygote._fork_own_zygote()
cluster = distnb.start(workers={workers}, ps=2)
"""
# A coordinator's script is no rank.
_ALONE = {"RANK": "", "WORLD_SIZE": ""}


def run_scripts(names: list[str], way: Way, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Run programs as scripts, and return each process's outcome by name.

    Args:
        names: The programs.
        way: One of their ways; all have the same strategy and number of replicas.
        folder: A folder for their files.
    """
    scripts = {}
    for number, name in enumerate(names):
        program = named(name)
        path = folder / f"{way}-{number}.py"
        constants = "".join(f"{key} = {value!r}\n" for key, value in program.constants.items())
        text = f"{TEXT}\n{program.module}\n{constants}\n{way.assigned(program)}\n{program.text}"
        path.write_text(text, encoding="utf-8")
        scripts[name] = str(path), program.dtype
    outcomes: dict[str, list[dict[str, Any]]] = {}
    while left := [name for name in names if name not in outcomes]:
        here = Path(tempfile.mkdtemp(dir=folder))
        output = _launch(way, [scripts[name] for name in left], here)
        processes = [dict(map(json.loads, file.read_text().splitlines())) for file in here.iterdir()]
        for name in left:
            ended = [each[scripts[name][0]] for each in processes if scripts[name][0] in each]
            if len(ended) < max(1, len(processes)):
                if not processes or not all("end" in each for each in processes):
                    outcomes[name] = [{"error": "a process ended", "traceback": output}]
                break
            outcomes[name] = ended
    return outcomes


def _launch(way: Way, scripts: list[tuple[str, str]], folder: Path) -> str:
    """Run scripts in new processes, and return the processes' output."""
    servers = way.strategy == "parameter_server"
    start = _START_SERVERS.format(workers=way.replicas) if servers else ""
    text = _DRIVER.format(programs=scripts, folder=str(folder), start=start, stop="cluster.stop()" if servers else "")
    limit_s = TIME_LIMIT_S - 20
    if way.strategy == "multi_worker" and way.replicas > 1:
        with Tasks(text, [f"worker {index}" for index in range(way.replicas)]) as tasks:
            ended: Any = tasks.wait(limit_s)
    else:
        ended = run_ranks(text, 1 if servers else way.replicas, timeout_s=limit_s, env=_ALONE if servers else None)
    return "\n".join(f"{each.returncode}\n{each.stdout}\n{each.stderr}" for each in ended)
